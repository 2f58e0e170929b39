"""Whether the engine that a recipe names can be there, asked before any long work: its interpreter, its version."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from quintain.agents.config import EngineConfig, LaunchConfig

ASK_TIMEOUT_S = 60.0
REMEDY = (
    "`make sglang` makes .sglang, for CPUs; for a GPU: python3 -m venv .sglang && "
    ".sglang/bin/pip install 'sglang>=0.5.23'"
)


def engine_problems(config: EngineConfig) -> list[str]:
    """What is wrong, each with its remedy; nothing is started."""
    if config.type == "local":
        return []
    return _launch_problems(config.launch) if config.launch else _url_problems(config.urls)


def _launch_problems(launch: LaunchConfig) -> list[str]:
    from quintain.agents.sglang.answers import EngineError
    from quintain.agents.sglang.client import check_version

    python = launch.python if "/" in launch.python else shutil.which(launch.python)
    if python is None or not Path(python).is_file():
        return [f"engine.launch.python: there is no interpreter {launch.python}; {REMEDY}"]
    # The version alone: importing SGLang takes ten seconds.
    ask = [python, "-I", "-c", "from importlib.metadata import version; print(version('sglang'))"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"engine.launch.python: {python} can't be run ({error}); {REMEDY}"]
    if answer.returncode != 0:
        return [f"engine.launch.python: SGLang is not installed where {python} belongs to; {REMEDY}"]
    try:
        check_version(answer.stdout.strip())
    except EngineError as error:
        return [f"engine.launch.python: {python}: {error}; {REMEDY}"]
    return []


def _url_problems(urls: tuple[str, ...]) -> list[str]:
    import asyncio

    from quintain.agents.sglang.answers import EngineError
    from quintain.agents.sglang.client import SGLangClient, check_version

    async def ask(url: str) -> str | None:
        client = SGLangClient(url)
        try:
            check_version((await client.info()).version)
        except EngineError as error:
            return f"engine.urls: {url}: {error}; start the server first, or let the run start it (engine.launch)"
        finally:
            await client.close()
        return None

    async def ask_all() -> list[str | None]:
        return list(await asyncio.gather(*map(ask, urls)))

    return [problem for problem in asyncio.run(ask_all()) if problem]
