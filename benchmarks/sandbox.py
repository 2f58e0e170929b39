"""Sandbox numbers as one JSON object on stdout: `quintain sandbox bench` at four sizes, plus the machine and the time.

PYTHONSAFEPATH=1 python benchmarks/sandbox.py > sandbox.json
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime

from quintain.sandbox.config import SandboxConfig
from quintain.sandbox.docker.bench import bench

SIZES = (1, 16, 64, 128)


def main() -> None:
    """Measure and print."""
    report = bench(SandboxConfig(type="docker"), sizes=SIZES, say=lambda text: print(text, file=sys.stderr))
    machine = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "num_cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    print(json.dumps({**machine, **report}, indent=2))


if __name__ == "__main__":
    main()
