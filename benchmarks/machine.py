"""Where and with what the figures were taken."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import databases
from .systems import System

ASK_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    system: str
    python: str
    sqlite: str
    commit: str
    load: float
    """Average over the minute before the run: a busy machine explains odd figures."""
    versions: dict[str, str]
    postgresql: dict[str, str] = field(default_factory=dict)


async def describe(systems: Sequence[System], kinds: Sequence[str]) -> Machine:
    return Machine(
        cpu=cpu_model(),
        cores=os.cpu_count() or 0,
        system=platform.platform(),
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        commit=commit(),
        load=os.getloadavg()[0],
        versions={system.name: version_of(system) for system in systems},
        postgresql=await databases.server_settings() if databases.POSTGRES in kinds else {},
    )


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def version_of(system: System) -> str:
    found = subprocess.run(
        [system.python, "-c", ASK_VERSION, system.distribution], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def commit() -> str:
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else "none"
