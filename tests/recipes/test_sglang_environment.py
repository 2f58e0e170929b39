"""The SGLang environment for CPUs: what its stand-ins do, and that no other program of it sees them."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest

from quintain.agents.sglang.server import ManagedServer

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "recipes" / "sglang_cpu" / "install.sh"

pytestmark = pytest.mark.sglang


def run_in(python: Path, code: str, *, cpu_engine: str | None) -> subprocess.CompletedProcess[str]:
    """Run `code` in the SGLang environment, as its own programs see it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SGLANG_"))}
    if cpu_engine is not None:
        environment["SGLANG_USE_CPU_ENGINE"] = cpu_engine
    return subprocess.run(
        [python, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("setting", [None, "0", "true"])
@pytest.mark.parametrize("package", ["triton", "sgl_kernel"])
def test_other_programs_of_the_environment_see_no_stand_in(sglang_python: Path, package: str, setting: str | None):
    result = run_in(sglang_python, f"import {package}", cpu_engine=setting)
    assert result.returncode == 1
    assert f"No module named '{package}'" in result.stderr


def test_names_of_gpu_packages_can_be_imported_and_never_give_a_result(sglang_python: Path):
    code = """
import importlib.util
import triton, triton.language as tl
from triton.runtime.errors import OutOfResources
from sgl_kernel import rmsnorm

@triton.autotune(configs=[triton.Config({"N": 8})], key=["n"])
@triton.jit
def kernel(x: tl.tensor, n: tl.constexpr): ...

import sgl_kernel
class Special(sgl_kernel.Something): ...


assert issubclass(OutOfResources, Exception)
assert (triton.cdiv(7, 4), triton.next_power_of_2(5), triton.next_power_of_2(8)) == (2, 8, 8)
assert importlib.util.find_spec("triton.knobs") is None
said = []
for call in (lambda: kernel[(1,)](1, 2), lambda: rmsnorm(1), lambda: tl.load(1)):
    try:
        call()
    except RuntimeError as error:
        said.append(str(error))
print("\\n".join(said))
"""
    result = run_in(sglang_python, code, cpu_engine="1")
    assert result.returncode == 0, result.stderr
    kernel, function, load = result.stdout.splitlines()
    assert kernel.startswith("the triton kernel kernel exists only in a GPU build")
    assert function.startswith("sgl_kernel.rmsnorm ")
    assert load.startswith("triton.language.load ")


def test_child_processes_get_the_stand_ins_too(sglang_python: Path):
    code = """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(eval, ("__import__('triton').__version__",)))
"""
    result = run_in(sglang_python, code, cpu_engine="1")
    assert result.stdout.strip() == "3.0.0", result.stderr


def test_what_is_really_installed_wins(sglang_python: Path, tmp_path: Path):
    (tmp_path / "triton.py").write_text("REAL = True\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import triton; print(triton.REAL)"
    result = run_in(sglang_python, code, cpu_engine="1")
    assert result.stdout.strip() == "True", result.stderr


def test_installing_again_does_nothing(sglang_python: Path):
    """An environment that `install.sh` finished is recognised by its stamp, without pip and network."""
    folder = sglang_python.parents[1]
    if not (folder / ".quintain").is_file():
        pytest.fail(f"{folder} was not made by {INSTALL.name} of this version: run `make sglang`")
    before = (folder / ".quintain").stat().st_mtime_ns
    result = subprocess.run(
        [INSTALL, folder], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=20
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert (folder / ".quintain").stat().st_mtime_ns == before


def test_a_real_server_samples_from_the_tiny_model(sglang_server: ManagedServer):
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [10, 20, 30], "sampling_params": sampling, "return_logprob": True}
    request = urllib.request.Request(
        f"{sglang_server.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.load(response)
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["weight_version"] == "0"
