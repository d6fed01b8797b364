"""`from edda.retry import ...`: the public names for retry policies."""

from edda.core.retry import (
    AGGRESSIVE_RETRY,
    CONSERVATIVE_RETRY,
    DEFAULT_RETRY_POLICY,
    INFINITE_RETRY,
    RetryPolicy,
)
from edda.errors import RetryExhaustedError, TerminalError

__all__ = [
    "AGGRESSIVE_RETRY",
    "CONSERVATIVE_RETRY",
    "DEFAULT_RETRY_POLICY",
    "INFINITE_RETRY",
    "RetryExhaustedError",
    "RetryPolicy",
    "TerminalError",
]
