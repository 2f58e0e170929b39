"""`quintain doctor template`: what it finds, its JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_templates import TEMPLATES, tokenizer
from toy_chat import CHATML, DROPS_REASONING
from toy_chat import tokenizer as toy_tokenizer

from quintain.agents.template_report import examine_template
from quintain.recipes.cli import main

KEPT_BY_QUESTIONS = {"qwen2.5", "qwen3-2507", "qwen3-coder", "llama3", "llama3.1", "deepseek-v3.2"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "template", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def saved(tokenizer: Any, folder: Path) -> str:
    tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_published_templates_are_told_apart_by_what_they_rewrite(name: str):
    """A03"""
    report = examine_template(tokenizer(name))
    assert report.family == TEMPLATES[name].family
    assert report.prefix_preserving == report.usable == (name != "deepseek-v3")
    assert report.prefix_preserving_over_questions == (name in KEPT_BY_QUESTIONS)
    rows = [finding for finding in report.findings if finding.name.startswith("a row of")]
    assert [finding.status for finding in rows] == ["note" if name in ("deepseek-v3", "llama3") else "ok"]


def test_a_template_that_suits_is_reported_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = saved(toy_tokenizer(CHATML), tmp_path / "model")
    code, out, _ = run(capsys, folder)
    assert code == 0 and "append-only" in out and "<|im_end|>" in out
    code, out, _ = run(capsys, folder, "--json")
    report = json.loads(out)
    assert code == 0 and report["usable"] is True and report["family"] == "hermes"
    assert {finding["status"] for finding in report["findings"]} <= {"ok", "note"}


def test_a_template_that_rewrites_a_tool_loop_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A03"""
    code, out, _ = run(capsys, saved(toy_tokenizer(DROPS_REASONING), tmp_path / "model"), "--json")
    failed = [finding for finding in json.loads(out)["findings"] if finding["status"] == "failed"]
    assert code == 1 and len(failed) == 1 and "append" in failed[0]["detail"]


@pytest.mark.parametrize("kind", ["missing", "empty", "no template"])
def test_a_folder_without_tokenizer_or_template_ends_with_2_and_the_remedy(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "model"
    if kind != "missing":
        folder.mkdir()
    if kind == "no template":
        saved(toy_tokenizer(CHATML), folder)
        (folder / "chat_template.jinja").unlink()
    code, _, err = run(capsys, str(folder))
    assert code == 2
    assert {"missing": "no folder", "empty": "tokenizer.json", "no template": "chat_template"}[kind] in err
