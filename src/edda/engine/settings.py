"""The engine's numbers, in seconds where nothing else is said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    lease: float = 15.0
    """A worker that has not renewed for so long may be taken over."""
    heartbeat: float = 3.0
    sweep: float = 2.0
    """How often lapsed leases are looked for."""
    takeover_grace: float = 5.0
    """Nobody is taken over so soon after a (re)connect: a restart of the database looks like everybody's death."""
    orphan_sweep: float = 60.0
    poll: float = 1.0
    """The safety net under every wake-up."""
    stall_limit: float = 300.0
    """An event loop stuck for so long no longer deserves its lease."""
    linger: float = 0.5
    """A run that is due again so soon stays in memory."""
    capacity: int = 1000
    """Runs in memory at once."""
    claim_batch: int = 100
    threads: int = 32
    """For sync activities."""
    shutdown_grace: float = 30.0
    late_grace: float = 10.0
    """How long the end of a run waits for bodies that were given up and go on all the same."""
    message_retention_days: float = 7.0
    """Events older than this are no longer found, nor told apart from new ones with the same id."""
    run_retention_days: float | None = None
    """Runs that ended so long ago are removed; None keeps them."""
    prune_every: float = 300.0
    history_warning: int = 10_240
    """Entries of a run's history from which on it is warned of."""
    history_limit: int = 51_200
    """Entries after which a run is stopped, as if it were cancelled."""
    child_depth: int = 100
    """Children of children of children, at most."""
    parked_first: float = 30.0
    parked_most: float = 3600.0

    @property
    def self_fence(self) -> float:
        """So long after the last good heartbeat a worker starts nothing more, out of politeness."""
        return self.lease * 0.8

    def parked_rest(self, attempts: int) -> float:
        return min(self.parked_first * 2.0 ** min(attempts, 16), self.parked_most)
