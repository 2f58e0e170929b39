"""What the tests of the SGLang client share: two sets of weights, and servers that a test may break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quintain.agents.config import LaunchConfig
from quintain.agents.renderer import ChatRenderer
from quintain.agents.sglang.server import ManagedServer
from quintain.recipes.build_model import load_model


@pytest.fixture(scope="session")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], ChatRenderer]:
    """The folders of the shared server's model and of one with other weights, and the renderer of both."""
    model, tokenizer = load_model(tiny_model_dir)
    other = tmp_path_factory.mktemp("other_weights")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    return [tiny_model_dir, other], ChatRenderer(tokenizer)


@pytest.fixture
def make_server(
    sglang_python: Path, models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ManagedServer]]:
    """Starts a server of the test's own, to be killed; stopped at its end."""
    servers: list[ManagedServer] = []

    def make(**settings: Any) -> ManagedServer:
        launch = LaunchConfig(python=str(sglang_python), device="cpu", dtype="float32", start_timeout_s=300, **settings)
        log = tmp_path_factory.mktemp("log") / "sglang.log"
        servers.append(ManagedServer(launch, model_dir=models[0][0], log=log))
        asyncio.run(servers[-1].start())
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def server(sglang_server: ManagedServer) -> ManagedServer:
    """The one that no test breaks."""
    return sglang_server
