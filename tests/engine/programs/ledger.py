"""What activities did in the world, kept where every process can see it and no crash can lose it."""

from __future__ import annotations

import os
from pathlib import Path


def record(ledger: str, line: str) -> None:
    """One write of one line: appending it is atomic."""
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def recorded(ledger: str | Path) -> list[str]:
    path = Path(ledger)
    return path.read_text().splitlines() if path.exists() else []
