"""RetryPolicy: when a failed attempt of an activity is repeated. The jitter is a hash of the step, not random."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from edda.errors import AppError, EventDeliveryError, EventError, NotInWorkflowError, TerminalError

from .options import explained_class

_NEVER_RETRIED = (TerminalError, EventError, NotInWorkflowError, AppError)
"""Another attempt would fail in the same way."""


@explained_class
@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff between the attempts of an activity."""

    initial_interval: float = 1.0
    """Seconds between the first and the second attempt."""
    backoff_coefficient: float = 2.0
    """Factor by which each further delay grows."""
    max_interval: float = 60.0
    """Upper limit of a delay, in seconds."""
    max_attempts: int | None = 5
    """Attempts including the first; None: no limit."""
    max_duration: float | None = 300.0
    """Seconds after the first attempt until which a new one may begin; None: no limit."""
    retryable_error_types: tuple[type[BaseException], ...] = (Exception,)
    """Errors of these classes are retried."""
    non_retryable_error_types: tuple[type[BaseException], ...] = ()
    """Errors of these classes are not retried; checked first."""
    jitter: float = 0.1
    """Fraction of each delay, 0 to 1, that varies by step, so that steps that fail together do not retry together."""
    count_crashes: bool = False
    """Count a death of the process, with this run alone in it, as a failed attempt. If False, the step is repeated
    until `Settings.max_process_deaths` parks the run."""

    def __post_init__(self) -> None:
        for name, least in (("initial_interval", 0), ("backoff_coefficient", 1), ("max_interval", 0), ("jitter", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"RetryPolicy({name}={getattr(self, name)!r}): must be at least {least}")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"RetryPolicy(max_attempts={self.max_attempts!r}): must be at least 1, or None")
        if self.jitter > 1:
            raise ValueError(f"RetryPolicy(jitter={self.jitter!r}): must be at most 1")

    def covers(self, error: BaseException) -> bool:
        """Whether errors of this class are retried."""
        if isinstance(error, (*_NEVER_RETRIED, *self.non_retryable_error_types)):
            return False
        if isinstance(error, EventDeliveryError) and not error.retryable:
            return False
        return isinstance(error, self.retryable_error_types)

    def delay(self, attempt: int, seed: str) -> float:
        """Seconds to wait after the failed attempt number `attempt`."""
        exponent = min(attempt - 1, 1000)
        try:
            delay = min(self.initial_interval * self.backoff_coefficient**exponent, self.max_interval)
        except OverflowError:
            delay = self.max_interval
        spread = zlib.crc32(f"{seed}#{attempt}".encode()) / 0xFFFFFFFF  # 0 to 1, the same on every replay
        return delay * (1 - self.jitter / 2 + self.jitter * spread)

    def allows(self, attempt: int, elapsed: float) -> bool:
        """Whether another attempt may follow number `attempt`, `elapsed` seconds after the first one was due."""
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return False
        return self.max_duration is None or elapsed < self.max_duration


DEFAULT_RETRY_POLICY = RetryPolicy()
AGGRESSIVE_RETRY = RetryPolicy(
    initial_interval=0.1, backoff_coefficient=1.5, max_interval=10.0, max_attempts=10, max_duration=60.0
)
CONSERVATIVE_RETRY = RetryPolicy(
    initial_interval=5.0, backoff_coefficient=2.0, max_interval=300.0, max_attempts=3, max_duration=900.0
)
INFINITE_RETRY = RetryPolicy(max_attempts=None, max_duration=None)
