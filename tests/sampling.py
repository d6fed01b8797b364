"""Which tests `make test` leaves to `make thorough`.

Storage is tested on every database, test by test, and so are crashes and hammers. What the engine does above it is the
same everywhere: each such test runs in memory and on one real database, always the same one for a test. And whoever
dies after one statement has left behind what he leaves who dies before the next one: crashes after a statement are
left out beside those before it. Of the plain scenarios one is crashed at every statement, the others where they differ
from it (`tests/crash/points.py`). Models are compared over fewer examples, always the same ones.
"""

from __future__ import annotations

import os
from collections import defaultdict
from zlib import crc32

import pytest

from edda.testing import CrashMode

SETTING = "EDDA_TEST_SAMPLE"
FOLDERS = ("tests/engine/", "tests/outbox/", "tests/control/")
FIXTURES = ("database", "shared_database")


def is_sampled() -> bool:
    return bool(os.environ.get(SETTING))


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those to leave out."""
    if not is_sampled():
        return []
    groups: defaultdict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        kind = _kind_of(item)
        if kind is not None and item.nodeid.startswith(FOLDERS):
            groups[item.nodeid.partition("[")[0]][kind].append(item)
    elsewhere = [item for name, group in groups.items() for kind in _left_out(name, set(group)) for item in group[kind]]
    return [*elsewhere, *filter(_dies_after, items)]


def _dies_after(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("how") is CrashMode.AFTER


def _kind_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    kinds = [] if callspec is None else [callspec.params[name] for name in FIXTURES if name in callspec.params]
    return kinds[0] if kinds else None


def _left_out(name: str, kinds: set[str]) -> set[str]:
    real = sorted(kinds - {"memory"})
    return set(real) - {real[crc32(name.encode()) % len(real)]} if real else set()
