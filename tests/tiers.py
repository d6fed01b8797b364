"""The tiers of the suite: which tests each of them runs, and on which databases.

This table is the only place that decides it. A test belongs to the databases that its parameters name, that its
`databases` mark names, or whose folder it is in; it runs in a tier if the tier has all of them. `--databases` replaces
the tier's own list. A test that opens a database which its tier does not have fails, so the mark cannot be forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pytest

from edda.testing import CrashMode

KINDS = ("memory", "sqlite", "postgres", "mysql")
SERVERS = ("postgres", "mysql")
PARAMETERS = ("database", "shared_database", "kind", "place", "proxy", "url", "storages")
"""Names of test parameters whose value is a database, if it is one of KINDS."""
FOLDERS = {f"tests/storage/{kind}/": kind for kind in SERVERS}
UNITS = tuple(
    f"tests/{name}/"
    for name in ("cloudevents", "control", "core", "engine", "integrations", "outbox", "storage", "workflow")
)
_CI_ONLY = ("tests/crash/", "tests/environments/", "tests/faults/")
_CRASHES = "tests/crash/"


@dataclass(frozen=True)
class Tier:
    databases: tuple[str, ...]
    folders: tuple[str, ...] = ("tests/",)
    without: tuple[str, ...] = ()
    """Folders and marks of tests that it leaves out."""
    examples: int = 12
    """Of each Hypothesis test; always the same ones."""
    crash_modes: tuple[CrashMode, ...] = (CrashMode.BEFORE, CrashMode.UNKNOWN)
    """A process that dies after a statement leaves behind what one leaves that dies before the next statement."""
    all_crash_points: bool = False
    """Also at statements that another scenario sends in the same way, and at every repetition of a read."""


TIERS = {
    "quick": Tier(("memory",), UNITS, without=("processes", "timed"), examples=5),
    "test": Tier(("memory", "sqlite", *SERVERS), without=(*_CI_ONLY, "browser")),
    "ci": Tier(KINDS),
    "thorough": Tier(KINDS, examples=20, crash_modes=tuple(CrashMode), all_crash_points=True),
}
"""`make test` passes the one server database that it found as `--databases` (tests/suite.py)."""
DEFAULT = "thorough"

_current = TIERS[DEFAULT]


def current() -> Tier:
    return _current


def choose(name: str, databases: str | None) -> Tier:
    """Make it this process's tier."""
    global _current
    _current = TIERS[name]
    if databases:
        kinds = tuple(databases.split(","))
        if unknown := set(kinds) - set(KINDS):
            raise pytest.UsageError(f"--databases: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
        _current = replace(_current, databases=kinds)
    return _current


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that the current tier runs, and the others."""
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (chosen if _runs(_current, item) else others).append(item)
    return chosen, others


def _runs(tier: Tier, item: pytest.Item) -> bool:
    return (
        item.nodeid.startswith(tier.folders)
        and set(_databases_of(item)) <= set(tier.databases)
        and not item.nodeid.startswith(tier.without)
        and not any(item.get_closest_marker(mark) for mark in tier.without)
        and _crash_mode(item) in (None, *tier.crash_modes)
    )


def _crash_mode(item: pytest.Item) -> object:
    """The mode of a test that crashes a scenario at each of its statements."""
    return _parameters(item).get("how") if item.nodeid.startswith(_CRASHES) else None


def _databases_of(item: pytest.Item) -> Iterator[str]:
    parameters = _parameters(item)
    yield from (parameters[name] for name in PARAMETERS if parameters.get(name) in KINDS)
    yield from (kind for folder, kind in FOLDERS.items() if item.nodeid.startswith(folder))
    for mark in item.iter_markers("databases"):
        yield from mark.args


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def skip_unless_ci(reason: str) -> NoReturn:
    """With CI set, a test fails if what it needs is not installed."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
