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


@dataclass(frozen=True)
class Waiting:
    count: int
    seconds: float


@dataclass(frozen=True)
class Moments:
    """When each of a series happened; None: it did not."""

    at: list[float | None]


@dataclass(frozen=True)
class Burst:
    """Every waiting workflow gets its own event, all at once."""

    sent: int
    finished: int
    seconds: float
    """From the first send to the end of the last workflow, or to giving up."""
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.finished / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds / max(1, self.finished)


@dataclass(frozen=True)
class Delays:
    """Milliseconds. What has not happened by the time of giving up counts as that late."""

    p50: float
    p99: float
    most: float
    least: float
    count: int
    missing: int = 0


@dataclass(frozen=True)
class Waking:
    burst: Burst
    here: Delays
    """Sender and worker in one process."""
    across: Delays | None
    """In two; None where that is not supported."""


@dataclass(frozen=True)
class Resources:
    """Of the driver's process, so far."""

    cpu_seconds: float
    rss_bytes: int
    statements: int | None
    """Sent to the database; None where the system does not tell."""


@dataclass(frozen=True)
class IdlePoint:
    waiting: int
    start_seconds: float
    added_mb: float
    cpu_percent: float
    statements: float | None
    """A second, as the client counts them."""
    queries: float | None
    """A second, as the server counts them: commits and rollbacks of PostgreSQL, MariaDB's Questions."""


@dataclass(frozen=True)
class Idling:
    points: tuple[IdlePoint, ...]


@dataclass(frozen=True)
class Punctuality:
    together: Delays
    """Behind the one instant at which all are due."""
    lone: Delays


@dataclass(frozen=True)
class Posts:
    events: int
    """Answered with 202."""
    seconds: float
    p50_ms: float
    p99_ms: float
    refused: int
    client_cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.events / self.seconds


@dataclass(frozen=True)
class Posting:
    single: Posts
    batched: Posts
    paced: Posts
    """Single ones at half the rate of `single`; times from when each was due to be sent."""
    lost: int
    """Answered and not in the database."""


@dataclass(frozen=True)
class Listening:
    address: str


@dataclass(frozen=True)
class Emitted:
    at: float
    """When the first workflow was started."""
    seconds: float
    """Until the last one ended."""


@dataclass(frozen=True)
class Arrived:
    count: int
    """Different ones."""
    at: float
    """The last one."""
    repeated: int


@dataclass(frozen=True)
class Flow:
    """Messages or events, all sent at once."""

    expected: int
    """Arrivals: a broadcast message arrives once for each subscriber."""
    arrived: int
    seconds: float
    """From the first send until all had arrived and were recorded; if some never did, to the last that arrived."""
    cpu_seconds: float
    repeated: int = 0
    copies: int = 1
    """Arrivals of one message."""

    @property
    def rate(self) -> float:
        """Messages, not arrivals."""
        return self.arrived / self.copies / self.seconds if self.arrived else 0.0

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds * self.copies / max(1, self.arrived)

    @property
    def lost(self) -> int:
        return self.expected - self.arrived


@dataclass(frozen=True)
class Talking:
    competing: Flow
    broadcast: Flow
    outbox: Flow

    @property
    def flows(self) -> tuple[Flow, ...]:
        return self.competing, self.broadcast, self.outbox

    @property
    def lost(self) -> int:
        return sum(flow.lost for flow in self.flows)


@dataclass(frozen=True)
class Booking:
    work: Throughput
    steps: int
    """In a workflow, each with its line."""
    lines: int
    """In the ledger, of the whole session."""

    @property
    def rate(self) -> float:
        return self.work.rate * self.steps

    @property
    def cpu_ms(self) -> float:
        return self.work.cpu_ms / self.steps

    @property
    def commits_each(self) -> float | None:
        return None if self.work.commits_each is None else self.work.commits_each / self.steps

    @property
    def strays(self) -> int:
        """Lines more, or fewer, than the workflows that succeeded have steps."""
        return self.lines - self.work.session_workflows * self.steps


Figures = (
    Throughput | Latency | Commits | Recovery | Replay | Waking | Idling | Punctuality | Posting | Talking | Booking
)


@dataclass(frozen=True)
class Sample:
    scenario: str
    system: str
    database: str
    round: int
    figures: Figures | None
    """None: the attempt failed, `error` says how."""
    error: str | None = None
