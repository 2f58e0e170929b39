"""docs/metrics.md lists exactly the registered metrics."""

from __future__ import annotations

import re
from pathlib import Path

from quintain.trainer.metrics import METRICS
from quintain.trainer.tracking.jsonl import NONFINITE_METRIC

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
REGENERATE = "write the rows again: PYTHONSAFEPATH=1 python tests/tracking/test_metrics_doc.py"
HEADING = "| metric | meaning |\n|---|---|\n"


def table() -> str:
    return HEADING + "".join(f"| `{name}` | {_escaped(text)} |\n" for name, text in METRICS.items())


def _escaped(sentence: str) -> str:
    return sentence.replace("|", r"\|")


def test_docs_and_registry_hold_the_same_metrics() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", DOC.read_text(encoding="utf-8"), re.M))

    assert rows == {name: _escaped(text) for name, text in METRICS.items()}, REGENERATE


def test_metric_names_are_area_and_what_and_every_sentence_ends() -> None:
    for name, sentence in METRICS.items():
        assert re.fullmatch(r"[a-z]+/[a-z0-9_]+", name), name
        assert sentence.endswith("."), name
    assert NONFINITE_METRIC in METRICS


if __name__ == "__main__":
    text = DOC.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEADING)
    after = re.sub(r"\A(\|.*\n)+", "", rest)
    DOC.write_text(before + table() + after, encoding="utf-8")
