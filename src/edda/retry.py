"""Retry policies, under the import path that existing programs use."""

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
