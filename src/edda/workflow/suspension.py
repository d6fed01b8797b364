"""How a run leaves memory: `Suspended` is thrown into each of its coroutines, by hand."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_MOST_THROWS = 100

_stuck: list[object] = []
"""Coroutines that would not let go. The collector would only print "coroutine ignored GeneratorExit"."""


class Suspended(BaseException):
    """The run leaves memory. Not an error: do not catch it."""


def unwind(coro: Coroutine[Any, Any, Any]) -> None:
    """End a coroutine that was started: what it makes of `Suspended` has no effect on the run."""
    _throw_until_ended(coro)


def close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    """Close an async generator that its user left by `break`, without an event loop to wait on."""
    closing = generator.aclose()
    try:
        closing.send(None)
    except BaseException:  # whatever it ends with is of no interest, StopIteration included
        return
    _throw_until_ended(closing)


def close_if_fresh(coro: Any) -> bool:
    """A coroutine that never ran has nothing to unwind; throwing into it would only warn."""
    fresh = coro.cr_await is None and coro.cr_frame.f_lasti <= 0
    if fresh:
        coro.close()
    return fresh


def _throw_until_ended(coro: Coroutine[Any, Any, Any]) -> None:
    for _ in range(_MOST_THROWS):
        try:
            coro.throw(Suspended("the run leaves memory"))
        except BaseException:  # whatever it ends with is of no interest, StopIteration included
            return
    logger.error("%r does not let go: it swallows BaseException in a loop; it stays in memory", coro)
    _stuck.append(coro)
