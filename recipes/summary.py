"""`RUN/summary.json`: the few numbers by which runs are compared."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from quintain.trainer.loop import LoopState


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one run came to."""

    success_before: float | None
    """Sampled success on held-out tasks after the warm start, before the first batch."""
    success_after: float | None
    """The same tasks and random streams after the last batch."""
    reward_first: float | None
    """Mean reward of the first batch."""
    reward_last: float | None
    steps: int
    """Finished batches."""
    seconds: dict[str, float]
    """Wall clock by phase, and `total`; of all parts of a resumed run together."""
    tokens_per_second: float
    """Sampled tokens over the seconds of rollouts and training."""
    max_staleness_seen: int
    sandbox: str
    """`docker`, `local` or `none`."""
    engine: str
    seed: int
    run_dir: str

    def write(self) -> None:
        """Write `summary.json` into the run folder, atomically."""
        path = Path(self.run_dir) / "summary.json"
        content = {key: value for key, value in asdict(self).items() if key != "run_dir"}
        beside = path.with_name(".summary.json.tmp")
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)


def summarise(state: LoopState, *, sandbox: str, engine: str, seed: int, run_dir: Path) -> Summary:
    """The summary of a run as far as it got."""
    total_s = sum(state.seconds.values())
    busy_s = state.seconds.get("rollout", 0.0) + state.seconds.get("train", 0.0)
    return Summary(
        success_before=state.success_before,
        success_after=state.success_after,
        reward_first=state.reward_first,
        reward_last=state.reward_last,
        steps=state.step,
        seconds={name: round(value, 3) for name, value in (state.seconds | {"total": total_s}).items()},
        tokens_per_second=round(state.num_sampled_tokens / busy_s, 1) if busy_s else 0.0,
        max_staleness_seen=state.max_staleness_seen,
        sandbox=sandbox,
        engine=engine,
        seed=seed,
        run_dir=str(run_dir),
    )
