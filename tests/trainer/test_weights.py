"""Weights reach a real SGLang server, or the run is told at which stage they did not."""

from __future__ import annotations

import asyncio
import copy
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_proxy import SlowProxy

from quintain.agents.local_policy import LocalPolicy
from quintain.agents.sglang.client import SGLangClient
from quintain.agents.sglang.policy import SGLangPolicy
from quintain.recipes.build_model import load_model
from quintain.trainer.model_files import save_model
from quintain.trainer.weights import DeliveryError, DiskDelivery, InProcessDelivery

PROMPT = tuple(range(20, 84))
NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return load_model(tiny_model_dir)[0]


def policy_of(url: str) -> SGLangPolicy:
    return SGLangPolicy([url], vocab_size=300)


def delivery_of(model: Any, url: str, root: Path, **settings: Any) -> tuple[DiskDelivery, SGLangPolicy]:
    policy = policy_of(url)
    export = settings.pop("export", lambda folder: save_model(model, folder))
    return DiskDelivery(root, export=export, urls=[url], policy=policy, **settings), policy


def change(model: Any) -> None:
    """As an optimizer step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))


def ask(url: str, *, new: int = 4, **sampling: Any) -> Any:
    """Raw, to see what the server says about its cache and versions."""

    async def run() -> Any:
        client = SGLangClient(url)
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True} | sampling,
            "return_logprob": True,
        }
        try:
            return await client.generate(body)
        finally:
            await client.close()

    return asyncio.run(run())


def gap(model: Any, answer: Any) -> float:
    """Largest difference between the server's log-probs and the model's own."""
    ids = list(PROMPT) + answer["output_ids"]
    with torch.no_grad():
        logprobs_TV = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    ours = [float(logprobs_TV[t - 1, ids[t]]) for t in range(len(PROMPT), len(ids))]
    theirs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def folders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_an_in_process_policy_is_told_the_version(model: Any):
    policy = LocalPolicy(model)
    InProcessDelivery(policy).deliver(3)
    assert policy.policy_version == 3


@pytest.mark.sglang
def test_after_a_delivery_the_server_samples_with_the_new_weights_and_an_empty_cache(
    model: Any, lent_sglang_url: str, tmp_path: Path
):
    """D03"""
    delivery, policy = delivery_of(model, lent_sglang_url, tmp_path / "weights")
    (tmp_path / "weights" / "v000044").mkdir(parents=True)  # of a version that was never delivered
    for version in (7, 8):
        change(model)
        delivery.deliver(version)
        first, second = ask(lent_sglang_url), ask(lent_sglang_url)
        assert first["meta_info"]["cached_tokens"] == 0 < second["meta_info"]["cached_tokens"]
        assert gap(model, first) < 1e-4
        assert gap(model, second) < 1e-4
        assert second["meta_info"]["weight_version"] == str(version)
        assert policy.policy_version == version
        assert folders(tmp_path / "weights") == {f"v{version:06d}"}


@pytest.mark.sglang
def test_a_reply_that_is_being_sampled_goes_on_with_the_new_weights(model: Any, lent_sglang_url: str, tmp_path: Path):
    """D04, D06: the cache is emptied though a request is open, and that request is not ended."""
    delivery, _ = delivery_of(model, lent_sglang_url, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, lent_sglang_url, new=900)
        time.sleep(0.5)
        change(model)
        delivery.deliver(5)
        answer = reply.result(timeout=60)["meta_info"]
    assert answer["completion_tokens"] == 900
    assert [span["version"] for span in answer["weight_versions"]] == ["0", "5"]


@pytest.mark.sglang
def test_weights_that_the_server_can_not_read_leave_the_old_ones_served(
    model: Any, lent_sglang_url: str, tmp_path: Path
):
    proxy = SlowProxy(lent_sglang_url, path="/update_weights_from_disk", delay_s=0.5)
    delivery, policy = delivery_of(model, proxy.url, tmp_path)
    delivery.deliver(1)
    served = copy.deepcopy(model)
    change(model)
    proxy.held.clear()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(delivery.deliver, 2)
        assert proxy.held.wait(30)
        shutil.rmtree(tmp_path / "v000002")  # as where the server does not see our disk
        with pytest.raises(
            DeliveryError, match=r"version 2 were not delivered, stage 'transfer': .*--resume"
        ) as caught:
            done.result(timeout=60)
    proxy.close()
    assert (caught.value.stage, caught.value.version) == ("transfer", 2)
    answer = ask(lent_sglang_url)  # it is not left paused
    assert answer["meta_info"]["weight_version"] == "1"
    assert gap(served, answer) < 1e-4
    assert policy.policy_version == 1
    assert folders(tmp_path) == {"v000001"}


@pytest.mark.sglang
def test_a_folder_goes_only_after_the_slow_server_has_read_a_newer_one(
    model: Any, lent_sglang_url: str, tmp_path: Path
):
    """D10: three quick updates, a reader that is late each time."""
    proxy = SlowProxy(lent_sglang_url, path="/update_weights_from_disk", delay_s=0.5)
    delivery, policy = delivery_of(model, proxy.url, tmp_path)
    seen: list[set[str]] = []
    for version in (1, 2, 3):
        proxy.held.clear()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(delivery.deliver, version)
            assert proxy.held.wait(30)
            seen.append(folders(tmp_path))
            done.result(timeout=60)
        assert folders(tmp_path) == {f"v{version:06d}"}
    proxy.close()
    assert seen == [{"v000001"}, {"v000001", "v000002"}, {"v000002", "v000003"}]
    assert policy.policy_version == 3


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("/pause_generation", "pause"),
        ("/update_weights_from_disk", "transfer"),
        ("/flush_cache", "transfer"),
        ("/continue_generation", "continue"),
    ],
)
def test_a_stage_that_does_not_end_is_named(model: Any, lent_sglang_url: str, tmp_path: Path, path: str, stage: str):
    proxy = SlowProxy(lent_sglang_url, path=path, delay_s=float("inf"))
    delivery, policy = delivery_of(model, proxy.url, tmp_path, stage_timeout_s=2.0)
    started = time.monotonic()
    with pytest.raises(DeliveryError, match=r"stage '\w+': .*2.0 s|Timeout") as caught:
        delivery.deliver(4)
    proxy.close()
    assert caught.value.stage == stage
    assert time.monotonic() - started < 8
    assert policy.policy_version == 0


@pytest.mark.parametrize(
    ("exported", "told"),
    [
        ("full", "No space left"),
        ("half", "does not read back"),
        ("nothing", "holds no weights"),
        ("hangs", "was not written within 0.5 s"),
    ],
)
def test_weights_that_can_not_be_written_are_never_offered(exported: str, told: str, model: Any, tmp_path: Path):
    over = threading.Event()

    def export(folder: Path) -> None:
        if exported == "nothing":
            return
        weights = folder / "model.safetensors"
        save_model(model, folder)
        weights.write_bytes(weights.read_bytes()[:100_000])
        if exported == "full":
            raise OSError(28, "No space left on device")
        if exported == "hangs":
            over.wait(20)

    delivery, _ = delivery_of(model, NO_SERVER, tmp_path, export=export, stage_timeout_s=0.5)
    with pytest.raises(DeliveryError, match=told) as caught:
        delivery.deliver(1)
    assert caught.value.stage == "save"
    assert not any(name.startswith("v") for name in folders(tmp_path))
    over.set()


def test_a_server_that_is_gone_is_named(model: Any, tmp_path: Path):
    delivery, _ = delivery_of(model, NO_SERVER, tmp_path)
    with pytest.raises(DeliveryError, match=f"{NO_SERVER}/pause_generation") as caught:
        delivery.deliver(1)
    assert caught.value.stage == "pause"


@pytest.mark.sglang
def test_a_server_is_brought_to_the_newest_delivered_weights(model: Any, lent_sglang_url: str, tmp_path: Path):
    """What happens after a server was started again; before any delivery it is left as it is."""
    delivery, _ = delivery_of(model, lent_sglang_url, tmp_path / "mine")

    def bring() -> str:
        async def run() -> str:
            client = SGLangClient(lent_sglang_url)
            await delivery.bring_up_to_date(client)
            version = (await client.info()).weight_version
            await client.close()
            return version

        return asyncio.run(run())

    assert bring() == "0"
    change(model)
    delivery.deliver(6)
    other, _ = delivery_of(model, lent_sglang_url, tmp_path / "other")
    other.deliver(2)
    assert bring() == "6"
    assert gap(model, ask(lent_sglang_url)) < 1e-4
