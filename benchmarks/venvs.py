"""A venv per peer, made when it is first needed and again when its requirements change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).parent / ".venvs"


def python_of(name: str) -> Path:
    return HOME / name / "bin" / "python"


def prepare(name: str, requirements: Sequence[str]) -> None:
    # Written last: a venv whose installation broke off has none and is made again.
    done = HOME / name / "requirements.txt"
    wanted = "\n".join(requirements)
    if done.exists() and done.read_text() == wanted:
        return
    print(f"installing {', '.join(requirements)} into {HOME / name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME / name], check=True)
    subprocess.run([python_of(name), "-m", "pip", "install", "-qq", *requirements], check=True)
    done.write_text(wanted)
