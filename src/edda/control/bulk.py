"""One action on many runs: those of some ids, or all that a search finds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from edda.errors import ActionRefusedError, ArgumentError, InstanceNotFoundError

from .run_search import RunSearcher
from .views import ActionResult, BulkOrder, RetryOrder

MOST_IDS = 1_000
MOST_FOUND = 10_000


class RunActions(Protocol):
    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult: ...

    async def retry_run(self, run_id: str, order: RetryOrder) -> ActionResult: ...

    async def resume_run(self, run_id: str) -> ActionResult: ...

    async def delete_run(self, run_id: str) -> ActionResult: ...


async def act_on_all(actor: RunActions, finder: RunSearcher, order: BulkOrder) -> ActionResult:
    act = _action_of(actor, order)
    if order.count_only:
        count = await _count(finder, order)
        return ActionResult(False, f"would {order.action} {_runs(count)}", count)
    done, refusals = 0, 0
    async for run_id in _ids(finder, order):
        try:
            await act(run_id)
            done += 1
        except (ActionRefusedError, InstanceNotFoundError):
            refusals += 1
    refused = f"; {_runs(refusals)} refused" if refusals else ""
    return ActionResult(done > 0, f"{order.action}: {_runs(done)} done{refused}", done)


def _action_of(actor: RunActions, order: BulkOrder) -> Callable[[str], Awaitable[ActionResult]]:
    actions: dict[str, Callable[[str], Awaitable[ActionResult]]] = {
        "cancel": lambda run_id: actor.cancel_run(run_id, order.reason),
        "retry": lambda run_id: actor.retry_run(run_id, RetryOrder(order.from_start)),
        "resume": actor.resume_run,
        "delete": actor.delete_run,
    }
    if order.action not in actions:
        raise ArgumentError(f"action {order.action!r}: expected one of {', '.join(actions)}")
    if bool(order.ids) == (order.search is not None):
        raise ArgumentError("which runs? Give either their ids or a search")
    if len(order.ids) > MOST_IDS:
        raise ArgumentError(f"{len(order.ids):,} ids: at most {MOST_IDS:,} at once")
    return actions[order.action]


async def _count(finder: RunSearcher, order: BulkOrder) -> int:
    if order.search is None:
        return len(set(order.ids))
    return min(sum((await finder.count(order.search, MOST_FOUND)).values()), MOST_FOUND)


async def _ids(finder: RunSearcher, order: BulkOrder) -> AsyncIterator[str]:
    if order.search is None:
        for run_id in dict.fromkeys(order.ids):
            yield run_id
        return
    async for record in finder.iterate(order.search, MOST_FOUND):
        yield record.run_id


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"
