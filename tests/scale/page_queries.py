"""What the pages ask of a database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from edda.control.run_search import TEXT_SCAN_LIMIT
from edda.core.model import MICROSECONDS, RunFilter, RunId
from edda.core.queries import EventQuery, RunQuery
from edda.core.states import RunStatus
from edda.storage.ports import Storage

Question = Callable[[], Awaitable[object]]

HOUR = 3600 * MICROSECONDS
DAY = 24 * HOUR


async def questions(storage: Storage) -> dict[str, Question]:
    """Each under the name of what people do."""
    now = await storage.now()
    somebody = (await storage.find(RunFilter(limit=1)))[0].run_id
    newest = await storage.scan_boundary(RunQuery(), TEXT_SCAN_LIMIT)
    late = (await storage.search(RunQuery(created_to=now - 15 * DAY, limit=1)))[0]
    runs = {
        "newest": RunQuery(),
        "the next page": RunQuery(after=(late.created_at, late.run_id)),
        "completed": _of(RunStatus.COMPLETED),
        "completed, cursor": RunQuery(statuses=frozenset({RunStatus.COMPLETED}), after=(late.created_at, late.run_id)),
        "failed": _of(RunStatus.FAILED),
        "failed or cancelled": _of(RunStatus.FAILED, RunStatus.CANCELLED),
        "waiting, the newest": _of(RunStatus.WAITING_FOR_EVENT),
        "waiting, the oldest": _of(RunStatus.WAITING_FOR_TIMER),
        "parked, which none is": _of(RunStatus.PARKED),
        "running, which none is": _of(RunStatus.RUNNING),
        "a workflow": RunQuery(workflow="workflow3"),
        "a rare workflow": RunQuery(workflow="rare"),
        "no such workflow": RunQuery(workflow="unheard_of"),
        "a workflow, failed": RunQuery(workflow="workflow3", statuses=frozenset({RunStatus.FAILED})),
        "by id": RunQuery(id_prefix=somebody),
        "ids of one beginning": RunQuery(id_prefix="run000"),
        "no such id": RunQuery(id_prefix="order"),
        "a day, two weeks ago": RunQuery(created_from=now - 15 * DAY, created_to=now - 14 * DAY),
        "a day, failed": RunQuery(
            created_from=now - 15 * DAY, created_to=now - 14 * DAY, statuses=frozenset({RunStatus.FAILED})
        ),
        "children, of which there are none": RunQuery(parent=somebody),
        "text in an id": RunQuery(text="N00000777", ids_after=newest),
    }
    pages: dict[str, Question] = {f"runs: {name}": _search(storage, query) for name, query in runs.items()}
    counts: dict[str, Question] = {
        f"count: {name}": _count(storage, runs[name]) for name in ("newest", "a workflow", "a day, two weeks ago")
    }
    return pages | counts | _others(storage, somebody, now)


def _of(*statuses: RunStatus) -> RunQuery:
    return RunQuery(statuses=frozenset(statuses))


def _search(storage: Storage, query: RunQuery) -> Question:
    return lambda: storage.search(query)


def _count(storage: Storage, query: RunQuery) -> Question:
    return lambda: storage.count(query)


def _others(storage: Storage, somebody: RunId, now: int) -> dict[str, Question]:
    async def show_run() -> None:
        await storage.get(somebody)
        await storage.history(somebody)
        await storage.waits(somebody)
        await storage.run_values(somebody)
        await storage.generations(somebody)
        await storage.search(RunQuery(parent=somebody, limit=100))

    async def show_stats() -> None:
        await storage.count(RunQuery())
        await storage.backlog()
        await storage.throughput(now - DAY, HOUR, 24)
        await storage.latency(now - DAY, 1_000)
        await storage.list_workers()

    return {
        "one run": show_run,
        "stats": show_stats,
        "backlog": storage.backlog,
        "throughput of a day": lambda: storage.throughput(now - DAY, HOUR, 24),
        "throughput of a busy day": lambda: storage.throughput(now - 5 * DAY, HOUR, 24),
        "latency": lambda: storage.latency(now - 5 * DAY, 1_000),
        "events: newest": lambda: storage.find_events(EventQuery()),
        "events: a rare type": lambda: storage.find_events(EventQuery(type="rare")),
        "events: one source and id": lambda: storage.find_events(EventQuery(source="shop", id=somebody)),
        "events: messages, of which there are none": lambda: storage.find_events(EventQuery(messages=True)),
        "who consumed an event": lambda: storage.consumers(10, 100),
        "waits": lambda: storage.list_waits(None, None, 50),
        "waits for a rare type": lambda: storage.list_waits("rare", None, 50),
        "the mark that pages watch": storage.change_token,
    }
