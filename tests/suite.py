"""All tests, in two parts: side by side, and two files at a time where time is measured. `--thorough` takes everything.

What fails in a crowd is tried once more by itself, and both are printed: a machine that is too busy fails tests that
are right, a bug fails again. A test that only passes alone is to be mended all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.sampling import SETTING

PARTS: tuple[tuple[str, list[str]], ...] = (
    ("not timed", ["-n", "6", "--dist", "worksteal"]),
    ("timed", ["-n", "2", "--dist", "loadfile"]),
)
FAILED = 1
"""pytest's exit code if tests failed; all others mean that something is wrong with the run itself."""
MOST_AGAIN = 10
"""More than a busy machine explains."""
THOROUGH = "--thorough"
CACHE = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: Sequence[str]) -> int:
    options = [one for one in arguments if one != THOROUGH]
    os.environ[SETTING] = "" if THOROUGH in arguments else "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of some hundred processes compiles everything anew
    for mark, workers in PARTS:
        CACHE.unlink(missing_ok=True)  # or it would name tests that failed another day
        code = run("-m", mark, *workers, *options)
        if code == FAILED:
            code = try_again(mark, options)
        if code:
            return code
    return 0


def try_again(mark: str, options: Sequence[str]) -> int:
    failed = sorted(json.loads(CACHE.read_text())) if CACHE.exists() else []
    if not 0 < len(failed) <= MOST_AGAIN:
        return FAILED
    print("\nfailed beside others, once more alone:", *failed, sep="\n  ", flush=True)
    return run("-m", mark, "--last-failed", "--last-failed-no-failures", "none", *options)


def run(*options: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
