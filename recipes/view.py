"""`quintain view`: Aim's web page for one run, with links that open where it matters; nothing is left behind.

Order: the run folder says where its Aim data is (`aim.json`); where there is none, it is made from the run's JSONL
files; `aim up` is started and waited for; the links are printed; Ctrl-C, SIGTERM or a closed terminal end the page
and every process that it started.
"""

from __future__ import annotations

import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from quintain.recipes.loader import RecipeError, load_recipe
from quintain.recipes.show import newest_run, without_metrics
from quintain.trainer.tracking import AimRecord, TrackingError, read_aim_record
from quintain.trainer.tracking.aim_links import deep_links
from quintain.trainer.tracking.aim_page import serve_aim
from quintain.trainer.tracking.token_text import Decode


def view(
    run_dir: Path | None = None,
    *,
    port: int | None = None,
    open_browser: bool = False,
    host: str = "127.0.0.1",
    stream: TextIO | None = None,
) -> None:
    """Serve the page of `run_dir` (None: the newest run under ./runs) until Ctrl-C or SIGTERM, then return.

    `port` None or 0 takes a free one. Raises RecipeError where there is no such run, or no page.
    """
    out = stream or sys.stdout
    run_dir = run_dir or newest_run()
    record = aim_data(run_dir, stream=out)
    print(f"starting Aim's page for {run_dir} …", file=out, flush=True)
    with _ended_by_signals():
        try:
            with serve_aim(record.repo, record.run_hash, host=host, port=port or 0) as base_url:
                links = deep_links(base_url, record.run_hash)
                print(f"\ntrajectories:\n{links.trajectories}\n\nreward curve:\n{links.reward}\n", file=out)
                print(f"everything else:\n{base_url}/runs/{record.run_hash}\n", file=out)
                print("Ctrl-C ends the page.", file=out, flush=True)
                if open_browser:
                    webbrowser.open(links.trajectories)
                threading.Event().wait()
        except TrackingError as error:
            raise RecipeError(str(error)) from error
        except KeyboardInterrupt:
            print("the page is closed", file=out, flush=True)


def aim_data(run_dir: Path, *, stream: TextIO) -> AimRecord:
    """Where the run's Aim data is; made from its JSONL files where there is none. Raises RecipeError for no run
    folder."""
    if not run_dir.is_dir():
        raise RecipeError(f"there is no run folder {run_dir}")
    if not (run_dir / "metrics.jsonl").is_file():
        raise RecipeError(without_metrics(run_dir))
    record = read_aim_record(run_dir)
    if record and (record.repo / "meta" / "chunks" / record.run_hash).is_dir():
        return record
    print(f"{run_dir} has no data in Aim: making it from metrics.jsonl and trajectories/ …", file=stream, flush=True)
    return rebuild_aim(run_dir)


def rebuild_aim(run_dir: Path) -> AimRecord:
    """Make the run's Aim data again from its JSONL files, replacing what Aim has of it. Raises RecipeError."""
    from quintain.trainer.tracking.rebuild import rebuild

    loaded = load_recipe(run_dir / "config.yaml")
    config = loaded.config
    try:
        return rebuild(
            run_dir,
            experiment=config.tracking.experiment or config.name,
            params={"recipe": dict(loaded.resolved), "seed": config.seed},
            config=config.tracking,
            decode=saved_decode(run_dir),
            mask_truncated=config.algorithm.truncated == "mask",
        )
    except (TrackingError, ValueError) as error:
        raise RecipeError(f"the Aim data of {run_dir} can't be made: {error}") from error


def saved_decode(run_dir: Path) -> Decode | None:
    """Token ids to text by the tokenizer of a checkpoint; None where none was saved: messages are shown without
    tokens."""
    files = sorted((run_dir / "checkpoints").glob("step_*/model/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    return partial(Tokenizer.from_file(str(files[-1])).decode, skip_special_tokens=False)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt inside the block: the default of the last two would leave
    Aim's processes running, and a shell lets what a script starts in the background ignore the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:  # a second one would break into the clean-up that the first began
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
