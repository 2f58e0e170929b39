"""`quintain view` as a user meets it: a real page in a real browser, and nothing left of it afterwards."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from constructed import group, trajectory
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from test_aim_tracker import open_tracker, stored, stored_texts

from quintain.agents.store import TrajectoryStore
from quintain.recipes.loader import RecipeError
from quintain.recipes.view import aim_data, rebuild_aim, saved_decode, view
from quintain.trainer.tracking import JsonlTracker, Trackers, read_aim_record

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
_CONFIG = "name: calculator\nenvironment: {id: quintain/Calculator-v0}\ntracking: {groups_per_step: 1}\n"


def make_run(run_dir: Path, *, steps: int = 6, aim: bool = True) -> None:
    """A run folder as training leaves it, from constructed groups; the first member of step 1 is hostile."""
    source = JsonlTracker(run_dir, strict=True)
    trackers = Trackers([source, open_tracker(run_dir)] if aim else [source])
    (run_dir / "config.yaml").write_text(_CONFIG)
    (run_dir / "status.json").write_text(json.dumps({"state": "finished"}))
    store = TrajectoryStore(run_dir / "trajectories")
    for step in range(1, steps + 1):
        whole, advantages = group(draw=step, size=8, versions=(step - 1, step - 1))
        if step == 1:
            hostile = trajectory(tool_result=HOSTILE, answer=HOSTILE, versions=(0, 0), draw=1)
            whole = replace(whole, trajectories=(hostile, *whole.trajectories[1:]))
        metrics = {"reward/mean": 1 - math.exp(-step / 3), "policy/version": float(step), "train/minibatch_steps": 1.0}
        store.write_step(step, [whole], [advantages])
        trackers.log_metrics(step, metrics | {"train/loss": math.nan if step == 2 else 0.1 / step})
        trackers.log_groups(step, [whole], [advantages], policy_version=step - 1)
    trackers.close("finished")


@contextmanager
def viewed(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`view` in a process of its own, and the links that it printed."""
    code = f"from pathlib import Path; from quintain.recipes.view import view; view(Path({str(run_dir)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    links: dict[str, str] = {}
    try:
        for line in process.stdout:
            if line.strip() in ("trajectories:", "reward curve:"):
                links[line.strip().rstrip(":")] = process.stdout.readline().strip()
            if "Ctrl-C" in line:
                break
        yield process, links
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        process.stdout.close()


def wait_for(browser: Chrome, css: str, at_least: int = 1) -> list[str]:
    """Texts of the elements, as soon as there are enough of them."""
    found = WebDriverWait(browser, 60).until(
        lambda b: elements if len(elements := b.find_elements(By.CSS_SELECTOR, css)) >= at_least else False
    )
    return [element.text for element in found]


@pytest.mark.browser
@pytest.mark.slow
def test_both_links_open_on_their_content_and_ctrl_c_leaves_nothing(tmp_path: Path, chromium: Chrome) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir)
    with viewed(run_dir) as (process, links):
        family = psutil.Process(process.pid).children(recursive=True)
        assert family

        chromium.set_window_size(4000, 1100)  # eight columns of 400
        chromium.get(links["trajectories"])
        first = wait_for(chromium, ".qn", at_least=8)[0]
        for badge in ("reward 1.000", "advantage +0.577", "success", "completed", "staleness 0", "96 tokens"):
            assert badge in first
        assert "What is 37 plus 48?" in first and "The answer is 85." in first
        page = chromium.find_element(By.TAG_NAME, "body").text
        assert "record.step=6" in page and "record.index=0" in page and "record.index=7" in page
        token = chromium.find_element(By.CSS_SELECTOR, ".qn s[title]")
        assert "logprob" in (token.get_attribute("title") or "") and "mask 1" in (token.get_attribute("title") or "")
        assert token.value_of_css_property("border-bottom-style") == "solid"
        assert token.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)"
        chromium.save_screenshot(str(tmp_path / "trajectories.png"))

        chromium.set_window_size(1700, 1100)
        chromium.get(links["reward curve"])
        wait_for(chromium, "svg path.Line, svg .Line")
        assert "reward/mean" in chromium.find_element(By.TAG_NAME, "body").text
        chromium.save_screenshot(str(tmp_path / "reward.png"))

        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert_gone(family, links["trajectories"])


@pytest.mark.browser
@pytest.mark.slow
def test_markup_from_a_tool_or_a_model_stays_text_on_the_page(tmp_path: Path, chromium: Chrome) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir, steps=1)
    with viewed(run_dir) as (_, links):
        chromium.get(links["trajectories"])
        first = wait_for(chromium, ".qn", at_least=4)[0]

        assert HOSTILE in first
        assert not chromium.find_elements(By.CSS_SELECTOR, ".qn img")
        assert chromium.title != "owned"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_view_leaves_no_process_and_no_port(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir, steps=1)
    with viewed(run_dir) as (process, links):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.send_signal(number)  # an impatient second one must not cut the clean-up short

        assert process.wait(30) == 0
        assert_gone(family, links["trajectories"])


def assert_gone(family: list[psutil.Process], link: str) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_runs(process) for process in family):
        time.sleep(0.1)
    assert not [process for process in family if _runs(process)]
    address = urlsplit(link)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=5).close()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_without_aim_data_gets_it_from_its_jsonl_files(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir, steps=3, aim=False)
    assert read_aim_record(run_dir) is None

    record = aim_data(run_dir, stream=sys.stdout)
    run = stored(run_dir)
    curves = {metric.name: list(metric.data.indices_list()) for metric in run.metrics()}
    steps, records = stored_texts(run)["rollouts_html"]

    assert record == read_aim_record(run_dir)
    assert run.experiment == "calculator" and run["status"] == "finished"
    assert curves["reward/mean"] == [1, 2, 3] and curves["metrics/nonfinite_num"] == [2]
    assert steps == [1, 2, 3] and [len(texts) for texts in records] == [8, 8, 8]
    assert "staleness 0" in records[2][0].data and "advantage +0.577" in records[2][0].data
    assert aim_data(run_dir, stream=sys.stdout) == record  # made once


def test_rebuilt_aim_data_replaces_the_old_and_a_deleted_repository_is_no_loss(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir, steps=1)
    before = read_aim_record(run_dir)
    again = rebuild_aim(run_dir)
    assert before is not None and before.run_hash != again.run_hash
    assert [path.name for path in (again.repo / "meta" / "chunks").iterdir()] == [again.run_hash]


def test_a_run_that_is_still_written_is_not_rebuilt(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir, steps=1)
    tracker = open_tracker(run_dir)
    with pytest.raises(RecipeError, match="is writing to this Aim run"):
        rebuild_aim(run_dir)
    tracker.close("finished")


def test_a_wrong_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no run folder .*nowhere"):
        view(tmp_path / "nowhere")
    with pytest.raises(RecipeError, match=r"no metrics\.jsonl"):
        view(tmp_path)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "calculator-1"
    make_run(run_dir, steps=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RecipeError, match=f"127.0.0.1:{port} .* another --port"):
            view(run_dir, port=port)


def test_tokens_are_decoded_by_the_tokenizer_of_the_newest_checkpoint(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    assert saved_decode(tmp_path) is None
    for step, word in ((9, "old"), (10, "new")):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}" / "model"
        folder.mkdir(parents=True)
        Tokenizer(models.WordLevel({word: 0}, unk_token=word)).save(str(folder / "tokenizer.json"))
    decode = saved_decode(tmp_path)

    assert decode is not None and decode([0]) == "new"
