"""What an engine must be able to do before boxes are made on it; each refusal names the remedy."""

from __future__ import annotations

import os
import shutil
from typing import Any

from quintain.sandbox.base import SandboxUnavailable
from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.engine import Engine, engine_errors

FREE_DISK_BYTES = 512 * 2**20
LIMITS = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "CPU"}
"""Field of the engine's own report -> what it would not limit."""


def check_engine(engine: Engine, config: SandboxConfig) -> None:
    """Raises SandboxUnavailable with everything that is wrong, EngineError where the engine does not tell."""
    with engine_errors("describe itself"):
        info = engine.client().info()
    problems = [*_limit_problems(info), *_runtime_problems(info, config), *_disk_problems(engine, info)]
    if problems:
        raise SandboxUnavailable(f"the Docker engine at {engine.address.given}: " + "; ".join(problems))


def _limit_problems(info: dict[str, Any]) -> list[str]:
    missing = [what for field, what in LIMITS.items() if not info.get(field)]
    problems = []
    if missing:
        problems.append(
            f"cannot limit {', '.join(missing)} (rootless on cgroup v1, or a kernel without these controllers): "
            "run it as root, or enable cgroup v2 with delegation"
        )
    if not any("seccomp" in option for option in info.get("SecurityOptions") or []):
        problems.append("has no seccomp: use a kernel and an engine built with it")
    if info.get("OSType") not in (None, "", "linux"):
        problems.append(f"runs {info['OSType']} containers: switch it to Linux containers")
    return problems


def _runtime_problems(info: dict[str, Any], config: SandboxConfig) -> list[str]:
    known = sorted(info.get("Runtimes") or {})
    if config.runtime is None or config.runtime in known:
        return []
    return [
        f"sandbox.runtime={config.runtime}: it knows {', '.join(known)}; install that runtime and add it to `runtimes` "
        "in the engine's daemon.json, or unset sandbox.runtime"
    ]


def _disk_problems(engine: Engine, info: dict[str, Any]) -> list[str]:
    root = info.get("DockerRootDir") or ""
    if not engine.address.given.startswith("unix://") or not os.path.isdir(root):
        return []  # the disk of another machine can't be seen from here
    free = shutil.disk_usage(root).free
    if free >= FREE_DISK_BYTES:
        return []
    return [
        f"has {free // 2**20} MiB left in {root}, fewer than {FREE_DISK_BYTES // 2**20}: make room "
        "(`docker system df` shows what takes it)"
    ]
