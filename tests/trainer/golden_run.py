"""The golden run: a few optimizer steps whose every bit is on record, in `golden_run.json`.

    python tests/trainer/golden_run.py            compute it here and compare
    python tests/trainer/golden_run.py --write    make the record anew: only where numbers are meant to change

The steps run in a child process that is bound to one thread and to kernels that every x86-64 machine has, so that equal
builds of torch and transformers give equal bits on different machines. Other builds may round differently; what they
compute must still agree closely.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("golden_run.json")
NUM_STEPS = 3
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",  # its exp and log come in several roundings
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
"""Environment of the child: which kernels the libraries choose depends on the machine otherwise."""
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {}},
    "kl and two minibatches": {"algorithm": {"kl_coef": 0.1, "minibatches_per_step": 2, "entropy_coef": 0.01}},
    "gspo, packed": {
        "algorithm": {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
        "trainer": {"packing": True},
    },
    "lora": {"algorithm": {}, "lora": {"rank": 4, "alpha": 8}},
}


def build() -> dict[str, str]:
    """What has to be equal for the bits to be."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}


def compute() -> dict[str, Any]:
    """In a child of `run_pinned`: the build, and for each setting the steps' numbers and a checksum of the weights."""
    import torch
    from trainer_data import mixed_samples, tiny_model

    from quintain.trainer.config import AlgorithmConfig, LoraConfig, TrainerConfig
    from quintain.trainer.learner import Learner

    torch.set_num_threads(1)
    runs: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        learner = Learner(
            tiny_model(),
            AlgorithmConfig(learning_rate=1e-2, max_grad_norm=0.5, **setting["algorithm"]),
            TrainerConfig(micro_batch_tokens=100, **setting.get("trainer", {})),
            temperature=0.9,
            lora=LoraConfig(**setting["lora"]) if "lora" in setting else None,
        )
        metrics = [learner.train_on(mixed_samples(seed=seed)) for seed in range(NUM_STEPS)]
        assert learner.full_model is not None
        digest = hashlib.sha256()
        for key, weight in sorted(learner.full_model.state_dict().items()):
            digest.update(key.encode() + weight.contiguous().numpy().tobytes())
        runs[name] = {
            "losses": [m["train/loss"] for m in metrics],
            "grad_norms": [m["train/grad_norm"] for m in metrics],
            "entropies": [m["train/entropy"] for m in metrics],
            "weights_sha256": digest.hexdigest(),
        }
    return {"build": build(), "runs": runs}


def run_pinned() -> dict[str, Any]:
    """`compute` in a process of its own, whose kernels do not depend on the machine."""
    paths = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | PINNED | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-c", "import json, golden_run; print(json.dumps(golden_run.compute()))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the golden run failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def difference(found: dict[str, Any], recorded: dict[str, Any], *, tolerance: float) -> str | None:
    """The first number that differs by more than `tolerance` of its size (0: in any bit); None where all agree."""
    for name, run in recorded["runs"].items():
        for what, numbers in run.items():
            mine = found["runs"][name][what]
            if what == "weights_sha256":
                if tolerance == 0 and mine != numbers:
                    return f"{name}: the weights after {NUM_STEPS} steps"
                continue
            for step, (a, b) in enumerate(zip(mine, numbers, strict=True)):
                if abs(a - b) > tolerance * max(1.0, abs(b)):
                    return f"{name}: {what}[{step}] is {a!r}, recorded {b!r}"
    return None


if __name__ == "__main__":
    result = run_pinned()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {RECORD}")
    else:
        problem = difference(result, json.loads(RECORD.read_text(encoding="utf-8")), tolerance=0)
        print(problem or "every bit as recorded")
        sys.exit(problem is not None)
