"""Read-only queries of the viewer and the CLI, on dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import nlargest
from itertools import islice

from msgspec.structs import astuple

from edda.core.model import OutboxState, RunId, RunRecord, StoredEvent
from edda.core.queries import (
    MAX_COUNT,
    Backlog,
    Definition,
    EventQuery,
    EventReceiver,
    EventSchema,
    Generation,
    Latency,
    RunQuery,
    TimeBucket,
    WaitRow,
    WorkerRecord,
)
from edda.core.states import WAITING, RunStatus
from edda.storage.shared.stats import measure

from .tables import OpenRun, Result, Tables

_CHANNEL = "channel/"


class MemoryQueries(Tables):
    # Runs

    def record(self, run_id: RunId, now: int) -> RunRecord:
        generation, start = max(self.runs[run_id].items(), key=lambda item: item[0])
        result, run = self.results.get(run_id), self.open_runs.get(run_id)
        return RunRecord(
            run_id=run_id,
            workflow=start.workflow,
            generation=generation,
            status=result.status if result else self.open_runs[run_id].status_at(now),
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            owner=run.owner if run else None,
            ready_at=run.ready_at if run else None,
            reason=run.reason if run else None,
            ended_at=result.ended_at if result else None,
            value=result.value if result else None,
            parent=start.parent,
            deaths=run.crashes.deaths if run else 0,
            has_cancel=run is not None and run.cancelled and not run.compensating and not run.end_if_parked,
        )

    def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        following = (run for run in self._fitting(query) if query.after is None or _sort_key(run) < query.after)
        return tuple(nlargest(query.limit, following, key=_sort_key))

    def count(self, query: RunQuery) -> dict[RunStatus, int]:
        counted = Counter(run.status for run in self._fitting(query))
        return {status: min(number, MAX_COUNT) for status, number in counted.items()}

    def _fitting(self, query: RunQuery) -> Iterator[RunRecord]:
        now = self.now()
        return (run for run_id in self.runs if _fits(run := self.record(run_id, now), query))

    def scan_boundary(self, query: RunQuery, scan_limit: int) -> tuple[int, RunId] | None:
        keys = [
            (start.created_at, run_id)
            for run_id, generations in self.runs.items()
            for start in generations.values()
            if query.workflow in (None, start.workflow)
            and (query.created_from is None or start.created_at >= query.created_from)
            and (query.created_to is None or start.created_at < query.created_to)
        ]
        return sorted(keys, reverse=True)[scan_limit] if len(keys) > scan_limit else None

    def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        return tuple(
            Generation(generation, start.created_at, len(self.histories.get((run_id, generation), ())))
            for generation, start in sorted(self.runs.get(run_id, {}).items())
        )

    # Events

    def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        newest_first = (self.events[seq] for seq in sorted(self.events, reverse=True))
        return tuple(islice((stored for stored in newest_first if _event_fits(stored, query)), query.limit))

    def event(self, seq: int) -> StoredEvent | None:
        return self.events.get(seq)

    def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        items = (item for inbox in self.inboxes.values() for item in inbox.values() if item.event == seq)
        first = sorted(items, key=lambda item: (item.at, item.run_id))[:limit]
        return tuple(EventReceiver(x.run_id, self.record(x.run_id, x.at).workflow, x.step, x.at) for x in first)

    def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        fitting = sorted(
            (run_id, step)
            for run_id, waits in self.wait_rows.items()
            for step, wait in waits.items()
            if type in (None, wait.type) and (after is None or (run_id, step) > after)
        )
        return tuple(
            WaitRow(run_id, self.open_runs[run_id].workflow, self.wait_rows[run_id][step])
            for run_id, step in fitting[:limit]
        )

    # Figures of the whole

    def list_workers(self) -> tuple[WorkerRecord, ...]:
        now, runs = self.now(), Counter(run.owner for run in self.open_runs.values())
        newest_first = sorted(self.leases, key=lambda id: (-self.registered_at[id], id))
        return tuple(
            WorkerRecord(
                self.infos[id], self.registered_at[id], self.leases[id], is_lapsed=self.leases[id] < now, runs=runs[id]
            )
            for id in newest_first
        )

    def backlog(self) -> Backlog:
        now = self.now()
        ready = [s for s in self.open_runs.values() if s.owner is None and s.ready_at is not None and s.ready_at <= now]
        waiting = [s for s in self.open_runs.values() if s.status_at(now) in WAITING]
        pending = [row for row in self.outbox.values() if row.state is OutboxState.PENDING]
        return Backlog(
            ready=min(len(ready), MAX_COUNT),
            oldest_ready=min(map(self._ready_since, ready), default=None),
            waiting=min(len(waiting), MAX_COUNT),
            oldest_wait=min(map(self._created, waiting), default=None),
            parked=_count(s.status_at(now) is RunStatus.PARKED for s in self.open_runs.values()),
            outbox_pending=min(len(pending), MAX_COUNT),
            outbox_dead=_count(row.state is OutboxState.DEAD for row in self.outbox.values()),
            oldest_outbox=pending[0].event.created_at if pending else None,
            staged_events=min(len(self.staged), MAX_COUNT),
        )

    def _ready_since(self, run: OpenRun) -> int:
        """A run that is ready at once is so since its first unread inbox item arrived, or else since its creation."""
        item = self.inboxes.get(run.run_id, {}).get(run.inbox_read + 1)
        return run.ready_at or (item.at if item else self._created(run))

    def _created(self, run: OpenRun) -> int:
        return self.runs[run.run_id][run.generation].created_at

    def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        started = (gens[0].created_at for gens in self.runs.values() if 0 in gens)
        starts = Counter((at - since) // width for at in started)
        ends = Counter(((result.ended_at - since) // width, result.status) for result in self.results.values())
        return tuple(
            TimeBucket(
                since + n * width,
                starts[n],
                ends[n, RunStatus.COMPLETED],
                ends[n, RunStatus.FAILED],
                ends[n, RunStatus.CANCELLED],
            )
            for n in range(count)
        )

    def latency(self, since: int, limit: int) -> Latency:
        ended = [item for item in self.results.items() if item[1].ended_at >= since]
        last = nlargest(limit, ended, key=lambda item: item[1].ended_at)
        return measure(self._duration(run_id, result) for run_id, result in last)

    def _duration(self, run_id: RunId, result: Result) -> int:
        return result.ended_at - self.runs[run_id][result.generation].created_at

    def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        return tuple(schema for (owner, _), schema in sorted(self.schema_rows.items()) if owner == workflow)

    def definitions(self) -> tuple[Definition, ...]:
        return tuple(definition for _, definition in sorted(self.definition_rows.items()))

    def change_token(self) -> str:
        state = (
            tuple(self.fences.values()),
            tuple(astuple(run) for run in self.open_runs.values()),
            tuple((row.seq, row.state, row.attempts) for row in self.outbox.values()),
            (self.newest, len(self.runs), len(self.results), self.last_staged_seq, len(self.staged)),
            (len(self.audit_rows), tuple(self.definition_rows.values()), tuple(self.schema_rows.values())),
        )
        return f"{hash(state):x}"


def _sort_key(run: RunRecord) -> tuple[int, RunId]:
    return run.created_at, run.run_id


def _count(values: Iterable[bool]) -> int:
    return min(sum(values), MAX_COUNT)


def _fits(run: RunRecord, query: RunQuery) -> bool:
    return (
        (not query.statuses or run.status in query.statuses)
        and query.workflow in (None, run.workflow)
        and query.parent in (None, run.parent)
        and run.run_id.startswith(query.id_prefix or "")
        and (query.created_from is None or run.created_at >= query.created_from)
        and (query.created_to is None or run.created_at < query.created_to)
        and (not query.text or _has_text(run, query, query.text))
    )


def _has_text(run: RunRecord, query: RunQuery, text: str) -> bool:
    is_recent = query.ids_after is None or _sort_key(run) > query.ids_after
    return run.run_id == text or _contains(text, run.reason or "", run.run_id if is_recent else "")


def _event_fits(stored: StoredEvent, query: EventQuery) -> bool:
    event = stored.event
    return (
        event.type.startswith(_CHANNEL) is query.messages
        and query.type in (None, event.type)
        and query.source in (None, event.source)
        and query.id in (None, event.id)
        and (query.before is None or stored.seq < query.before)
        and (query.received_from is None or stored.received_at >= query.received_from)
        and (query.received_to is None or stored.received_at < query.received_to)
        and _contains(query.text, event.type, event.source, event.id)
    )


def _contains(text: str | None, *places: str) -> bool:
    return text is None or any(text.lower() in place.lower() for place in places)
