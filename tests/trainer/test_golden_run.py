"""A change that is not meant to change numbers changes no bit of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from golden_run import RECORD, build, difference, run_pinned

REMEDY = "where that is meant, make the record anew: PYTHONSAFEPATH=1 python tests/trainer/golden_run.py --write"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_golden_run_is_reproduced_bit_for_bit(recorded: dict[str, Any]) -> None:
    """In another build of torch or transformers, whose roundings are its own, to five digits."""
    found = run_pinned()
    problem = difference(found, recorded, tolerance=0 if recorded["build"] == build() else 1e-5)
    assert problem is None, f"{problem}; {REMEDY}"


def test_one_bit_of_one_number_or_weight_is_a_difference(recorded: dict[str, Any]) -> None:
    for what in ("losses", "grad_norms", "entropies", "weights_sha256"):
        other = json.loads(json.dumps(recorded))
        run = other["runs"]["lora"]
        run[what] = "0" if isinstance(run[what], str) else [*run[what][:-1], math.nextafter(run[what][-1], math.inf)]
        found = difference(other, recorded, tolerance=0)
        assert found is not None and found.startswith("lora: ")
        assert difference(other, recorded, tolerance=1e-5) is None
