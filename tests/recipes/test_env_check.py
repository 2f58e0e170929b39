"""`quintain env check`: passes what is sound, and says what is wrong with what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintain.envs.errors import EnvironmentImportError, UnknownEnvironmentError
from quintain.recipes.cli_env import check, check_environment

SOUND = '''
from quintain.envs import ToolEnv, reward, tool

class Adder(ToolEnv):
    """Sums."""
    needs_isolation = False

    def rows(self, split):
        start = 0 if split == "train" else 1000
        return [{"prompt": f"Add {n} and 1.", "n": n} for n in range(start, start + 20)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    @reward
    def right(self) -> float:
        return float(self.answer.strip() == str(self.task.data["n"] + 1))

    def demonstrate(self, task, *, clean, rng):
        n = task.data["n"]
        return self.dialogue(("add", {"a": n, "b": 1}CLAIM), str(n + (1 if clean else 2)))
'''


def environment(folder: Path, *, claim: str = "", **changes: str) -> str:
    text = SOUND.replace("CLAIM", claim)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Adder"


def found(env_id: str) -> dict[str, tuple[str, str]]:
    return {result.name: (result.status, result.detail) for result in check(env_id, None)}


def test_a_sound_environment_passes_every_check(tmp_path: Path):
    results = found(environment(tmp_path))
    assert {status for status, _ in results.values()} == {"ok"}, results
    assert results["clean demonstrations"] == ("ok", "16 replayed, all succeed")
    assert results["mixed demonstrations"] == ("ok", "16 replayed, 0 succeed")


def test_a_demonstration_that_the_real_tool_contradicts_is_found(tmp_path: Path):
    status, detail = found(environment(tmp_path, claim=', "7"'))["clean demonstrations"]
    assert status == "failed"
    assert "the demonstration says '7', the tool says '1'" in detail


def test_a_clean_demonstration_that_earns_nothing_is_found(tmp_path: Path):
    results = found(environment(tmp_path, **{"(1 if clean else 2)": "2"}))
    status, detail = results["clean demonstrations"]
    assert status == "failed"
    assert detail.startswith("16 of 16 do not succeed; the first is task ")
    assert detail.endswith("the answer '2' earns right = 0")


def test_an_argument_without_a_description_and_shared_prompts_are_remarked_on(tmp_path: Path):
    results = found(environment(tmp_path, **{"b: The second.": "", "else 1000": "else 0"}))
    assert results["tool schemas"][0] == "note" and "argument b has no description" in results["tool schemas"][1]
    assert results["tasks"] == ("note", "20 train, 20 eval; 20 prompts are in both")


def test_an_environment_that_does_not_start_is_one_failed_line(tmp_path: Path):
    results = found(environment(tmp_path, **{"return [{": "return 1 / 0 or [{"}))
    assert list(results) == ["starts"]
    assert results["starts"][0] == "failed" and "ZeroDivisionError" in results["starts"][1]
    assert f"in rows ({tmp_path / 'mine.py'}:10)" in results["starts"][1]


def test_what_a_tool_raises_is_told_with_its_place(tmp_path: Path):
    results = found(environment(tmp_path, claim=', "1"', **{"return a + b": "return a / 0"}))
    status, detail = results["clean demonstrations"]
    assert status == "failed"
    assert detail == f"ZeroDivisionError: division by zero, in add ({tmp_path / 'mine.py'}:20)"


@pytest.mark.parametrize("text", ["import nowhere\n", "def f(:\n"])
def test_a_file_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path, text: str):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(EnvironmentImportError, match=r"mine\.py, line 1"):
        check_environment(f"{tmp_path / 'mine.py'}:Adder", sandbox_type="auto")


def test_a_file_without_a_class_is_told_which_there_are(tmp_path: Path):
    file = environment(tmp_path).removesuffix(":Adder")
    with pytest.raises(UnknownEnvironmentError, match=r"names no class.*mine\.py:Adder"):
        check_environment(file, sandbox_type="auto")


@pytest.mark.parametrize(("claim", "passes"), [("", True), (', "7"', False)])
def test_the_report_says_whether_all_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], claim: str, passes: bool
):
    assert check_environment(environment(tmp_path, claim=claim), sandbox_type="auto") is passes
    assert "clean demonstrations" in capsys.readouterr().out


def test_the_calculator_passes_in_a_local_sandbox():
    assert check_environment("quintain/Calculator-v0", sandbox_type="local")
