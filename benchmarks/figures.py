"""What is measured. Both sides of the pipe use these records, so: standard library only.

Times called `at` are on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Opened:
    pass


@dataclass(frozen=True)
class Throughput:
    workflows: int
    seconds: float
    cpu_seconds: float
    errors: int
    """Workflows whose caller got an exception instead of a result; not counted in `workflows`."""
    commits: int | None = None
    """In the whole session, warm-up and all; None where the database does not say."""
    session_workflows: int = 0

    @property
    def rate(self) -> float:
        return self.workflows / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds / max(1, self.workflows)

    @property
    def commits_each(self) -> float | None:
        return None if self.commits is None else self.commits / max(1, self.session_workflows)


@dataclass(frozen=True)
class Latency:
    step_ms: float
    """Median time between the bodies of two steps that follow each other."""
    workflow_ms: float
    """Median time from start to result."""
    samples: int


@dataclass(frozen=True)
class Commits:
    """Single-row INSERTs, each in a transaction of its own: what the bare driver gives."""

    rate: float
    median_ms: float
    in_flight: int
    cpu_ms: float


@dataclass(frozen=True)
class Held:
    count: int


@dataclass(frozen=True)
class Finished:
    count: int
    at: float


@dataclass(frozen=True)
class Recovery:
    held: int
    finished: int
    seconds: float
    """From the kill to the last finish, or to giving up."""

    @property
    def complete(self) -> bool:
        return 0 < self.held == self.finished


@dataclass(frozen=True)
class Suspended:
    run_id: str
    seconds: float


@dataclass(frozen=True)
class Replayed:
    total_seconds: float
    """From opening the system in a fresh process to the step after the wait."""
    replay_seconds: float
    """Of these, from the first line of the workflow's code."""


@dataclass(frozen=True)
class ReplayPoint:
    steps: int
    insert_seconds: float
    total_seconds: float
    replay_seconds: float


@dataclass(frozen=True)
class Replay:
    points: tuple[ReplayPoint, ...]


Figures = Throughput | Latency | Commits | Recovery | Replay


@dataclass(frozen=True)
class Sample:
    scenario: str
    system: str
    database: str
    round: int
    figures: Figures | None
    """None: the attempt failed, `error` says how."""
    error: str | None = None
