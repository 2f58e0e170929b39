"""How quick boxes are here, each quick way beside the plain one, in one run, so that both see the same machine.

    channel v. `docker exec`      one command in the same box, taken in turns
    pool hit v. cold start        a used box proved clean and handed out again v. one made from nothing
    n boxes                       commands a second on one event loop, and memory

Each is a median of few samples: a busy machine shows in all of them, least in the ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quintain.sandbox.background import background_loop
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.box import DockerSandbox
from quintain.sandbox.docker.hosts import Fleet, Host
from quintain.sandbox.docker.pool import open_docker_pool
from quintain.sandbox.start_gate import PARALLEL_STARTS

COMMAND = ["true"]
NUM_CHANNEL, NUM_DOCKER_EXEC, NUM_POOL_HITS, NUM_COLD = 200, 20, 50, 5
THROUGHPUT_S = 2.0
NUM_MEMORY_SAMPLES = 8


def bench(
    config: SandboxConfig, *, sizes: Sequence[int] = (1, 16), say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure. Every key that ends in `_s` is seconds; ratios are slow / quick. Raises SandboxError."""
    fleet = Fleet.open(config, owner="bench")
    try:
        say(f"{NUM_CHANNEL} commands over the channel, {NUM_DOCKER_EXEC} by docker exec")
        report: dict[str, Any] = dict(background_loop().run(_commands(fleet)))
        say(f"{NUM_COLD} cold starts")
        report.update(background_loop().run(_cold_starts(fleet)))
        say(f"{NUM_POOL_HITS} pool hits")
        report.update(_pool_hits(config))
        report["exec_ratio"] = report["docker_exec_p50_s"] / report["channel_p50_s"]
        report["start_ratio"] = report["cold_start_p50_s"] / report["pool_hit_p50_s"]
        report["boxes"] = []
        for size in sizes:
            say(f"{size} boxes at once")
            report["boxes"].append(background_loop().run(_many(fleet, size)))
    finally:
        fleet.close()
    image = fleet.hosts[0].image
    report.update(image=image and image.reference, runtime=config.runtime or "default", num_engines=len(fleet.hosts))
    return report


async def _commands(fleet: Fleet) -> dict[str, float]:
    box = fleet.make_box()
    await box.start()
    host = next(host for host in fleet.hosts if box in host.boxes)
    channel, docker_exec = [], []
    try:
        for number in range(NUM_CHANNEL):
            channel.append(await _timed(box.exec(COMMAND)))
            if number % (NUM_CHANNEL // NUM_DOCKER_EXEC) == 0:
                docker_exec.append(await _timed(_docker_exec(host, box)))
    finally:
        await box.stop()
    return {
        "channel_p50_s": statistics.median(channel),
        "channel_p95_s": _p95(channel),
        "docker_exec_p50_s": statistics.median(docker_exec),
        "docker_exec_p95_s": _p95(docker_exec),
    }


async def _docker_exec(host: Host, box: DockerSandbox) -> None:
    def run(client: Any) -> None:
        made = client.exec_create(box.id, COMMAND)
        client.exec_start(made["Id"])
        client.exec_inspect(made["Id"])

    await host.engine.call("run a command", run)


async def _cold_starts(fleet: Fleet) -> dict[str, float]:
    seconds = []
    for _ in range(NUM_COLD):
        box = fleet.make_box()
        seconds.append(await _timed(box.start()))
        await box.stop()
    return {"cold_start_p50_s": statistics.median(seconds), "cold_start_p95_s": _p95(seconds)}


def _pool_hits(config: SandboxConfig) -> dict[str, float]:
    """From giving a box back to having it again: reset, proof and hand-out."""
    seconds = []
    pool = open_docker_pool(config.model_copy(update={"pool_size": 1, "reuse": "reset"}), owner="bench")
    with pool:
        handle = pool.acquire()
        for _ in range(NUM_POOL_HITS):
            handle.exec("echo x >f; setsid sleep 100 &")
            started = time.perf_counter()
            pool.release(handle)
            handle = pool.acquire()
            seconds.append(time.perf_counter() - started)
    return {"pool_hit_p50_s": statistics.median(seconds), "pool_hit_p95_s": _p95(seconds)}


async def _many(fleet: Fleet, size: int) -> dict[str, Any]:
    gate = asyncio.Semaphore(PARALLEL_STARTS)
    boxes: list[DockerSandbox] = []

    async def start() -> None:
        async with gate:
            box = fleet.make_box()
            boxes.append(box)
            await box.start()

    free_before = _memory_available()
    try:
        start_s = await _timed(asyncio.gather(*(start() for _ in range(size))))
        free_after = _memory_available()
        memory = [await _memory(fleet, box) for box in boxes[:NUM_MEMORY_SAMPLES]]
        deadline = time.perf_counter() + THROUGHPUT_S

        async def work(box: DockerSandbox) -> int:
            count = 0
            while time.perf_counter() < deadline:
                await box.exec(COMMAND)
                count += 1
            return count

        started = time.perf_counter()
        count = sum(await asyncio.gather(*(work(box) for box in boxes)))
        seconds = time.perf_counter() - started
    finally:
        await asyncio.gather(*(box.stop() for box in boxes), return_exceptions=True)
    return {
        "num_boxes": size,
        "start_s": start_s,
        "execs_per_s": count / seconds,
        "box_memory_bytes": int(statistics.median(memory)) if memory else None,
        "machine_memory_bytes": max(0, free_before - free_after) if free_before and free_after else None,
    }


async def _memory(fleet: Fleet, box: DockerSandbox) -> int:
    host = next(host for host in fleet.hosts if box in host.boxes)
    found = await host.engine.call("tell a box's memory", lambda c: c.stats(box.id, stream=False, one_shot=True))
    usage = found.get("memory_stats") or {}
    return int(usage.get("usage") or 0)


def _memory_available() -> int | None:
    """Of this machine, which is the engine's too where that is reached over a socket file."""
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    return None


async def _timed(awaitable: Any) -> float:
    started = time.perf_counter()
    await awaitable
    return time.perf_counter() - started


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]
