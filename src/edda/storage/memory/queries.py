"""What people ask, of dictionaries."""

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


class MemorySurvey(Tables):
    # Runs

    def record(self, run_id: RunId, now: int) -> RunRecord:
        gen, start = max(self.runs[run_id].items(), key=lambda item: item[0])
        result, sched = self.results.get(run_id), self.scheds.get(run_id)
        return RunRecord(
            run_id=run_id,
            workflow=start.workflow,
            gen=gen,
            status=result.status if result else self.scheds[run_id].status_at(now),
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            owner=sched.owner if sched else None,
            ready_at=sched.ready_at if sched else None,
            reason=sched.reason if sched else None,
            ended_at=result.ended_at if result else None,
            value=result.value if result else None,
            parent=start.parent,
            deaths=sched.crashes.deaths if sched else 0,
            has_cancel=sched is not None and sched.cancelled and not sched.undoing and not sched.end_if_parked,
        )

    def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        following = (run for run in self._fitting(query) if query.after is None or _place(run) < query.after)
        return tuple(nlargest(query.limit, following, key=_place))

    def count(self, query: RunQuery) -> dict[RunStatus, int]:
        counted = Counter(run.status for run in self._fitting(query))
        return {status: min(number, MAX_COUNT) for status, number in counted.items()}

    def _fitting(self, query: RunQuery) -> Iterator[RunRecord]:
        now = self.now()
        return (run for run_id in self.runs if _fits(run := self.record(run_id, now), query))

    def scan_boundary(self, query: RunQuery, reach: int) -> tuple[int, RunId] | None:
        keys = [
            (start.created_at, run_id)
            for run_id, generations in self.runs.items()
            for start in generations.values()
            if query.workflow in (None, start.workflow)
            and (query.created_from is None or start.created_at >= query.created_from)
            and (query.created_to is None or start.created_at < query.created_to)
        ]
        return sorted(keys, reverse=True)[reach] if len(keys) > reach else None

    def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        return tuple(
            Generation(gen, start.created_at, len(self.histories.get((run_id, gen), ())))
            for gen, start in sorted(self.runs.get(run_id, {}).items())
        )

    # Events

    def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        newest_first = (self.events[seq] for seq in sorted(self.events, reverse=True))
        return tuple(islice((stored for stored in newest_first if _suits(stored, query)), query.limit))

    def event(self, seq: int) -> StoredEvent | None:
        return self.events.get(seq)

    def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        letters = (letter for inbox in self.inboxes.values() for letter in inbox.values() if letter.event == seq)
        told = sorted(letters, key=lambda letter: (letter.at, letter.run_id))[:limit]
        return tuple(EventReceiver(x.run_id, self.record(x.run_id, x.at).workflow, x.step, x.at) for x in told)

    def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        fitting = sorted(
            (run_id, step)
            for run_id, waits in self.waiting.items()
            for step, wait in waits.items()
            if type in (None, wait.type) and (after is None or (run_id, step) > after)
        )
        return tuple(
            WaitRow(run_id, self.scheds[run_id].workflow, self.waiting[run_id][step])
            for run_id, step in fitting[:limit]
        )

    # The whole

    def list_workers(self) -> tuple[WorkerRecord, ...]:
        now, runs = self.now(), Counter(sched.owner for sched in self.scheds.values())
        newest_first = sorted(self.workers, key=lambda id: (-self.registered[id], id))
        return tuple(
            WorkerRecord(
                self.infos[id], self.registered[id], self.workers[id], is_lapsed=self.workers[id] < now, runs=runs[id]
            )
            for id in newest_first
        )

    def backlog(self) -> Backlog:
        now = self.now()
        ready = [s for s in self.scheds.values() if s.owner is None and s.ready_at is not None and s.ready_at <= now]
        waiting = [s for s in self.scheds.values() if s.status_at(now) in WAITING]
        pending = [record for record in self.outbox.values() if record.state is OutboxState.PENDING]
        return Backlog(
            ready=min(len(ready), MAX_COUNT),
            oldest_ready=min(map(self._ready_since, ready), default=None),
            waiting=min(len(waiting), MAX_COUNT),
            oldest_wait=min(map(self._created, waiting), default=None),
            parked=_count(s.status_at(now) is RunStatus.PARKED for s in self.scheds.values()),
            outbox_pending=min(len(pending), MAX_COUNT),
            outbox_dead=_count(record.state is OutboxState.DEAD for record in self.outbox.values()),
            oldest_outgoing=pending[0].event.created_at if pending else None,
            dispatches=min(len(self.waiting_dispatches), MAX_COUNT),
        )

    def _ready_since(self, sched: OpenRun) -> int:
        """Who is ready at once is so since its mail came, or else from its beginning."""
        letter = self.inboxes.get(sched.run_id, {}).get(sched.absorbed + 1)
        return sched.ready_at or (letter.at if letter else self._created(sched))

    def _created(self, sched: OpenRun) -> int:
        return self.runs[sched.run_id][sched.gen].created_at

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

    def latency(self, since: int, most: int) -> Latency:
        ended = [item for item in self.results.items() if item[1].ended_at >= since]
        last = nlargest(most, ended, key=lambda item: item[1].ended_at)
        return measure(self._duration(run_id, result) for run_id, result in last)

    def _duration(self, run_id: RunId, result: Result) -> int:
        return result.ended_at - self.runs[run_id][result.gen].created_at

    def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        return tuple(form for (of, _), form in sorted(self.known_forms.items()) if of == workflow)

    def definitions(self) -> tuple[Definition, ...]:
        return tuple(definition for _, definition in sorted(self.known_workflows.items()))

    def change_token(self) -> str:
        facts = (
            tuple(self.fences.values()),
            tuple(astuple(sched) for sched in self.scheds.values()),
            tuple((record.seq, record.state, record.attempts) for record in self.outbox.values()),
            (self.newest, len(self.runs), len(self.results), self.dispatched, len(self.waiting_dispatches)),
            (len(self.audit_rows), tuple(self.known_workflows.values()), tuple(self.known_forms.values())),
        )
        return f"{hash(facts):x}"


def _place(run: RunRecord) -> tuple[int, RunId]:
    return run.created_at, run.run_id


def _count(facts: Iterable[bool]) -> int:
    return min(sum(facts), MAX_COUNT)


def _fits(run: RunRecord, query: RunQuery) -> bool:
    return (
        (not query.statuses or run.status in query.statuses)
        and query.workflow in (None, run.workflow)
        and query.parent in (None, run.parent)
        and run.run_id.startswith(query.id_prefix or "")
        and (query.created_from is None or run.created_at >= query.created_from)
        and (query.created_to is None or run.created_at < query.created_to)
        and (not query.text or _is_told(run, query, query.text))
    )


def _is_told(run: RunRecord, query: RunQuery, text: str) -> bool:
    is_recent = query.ids_after is None or _place(run) > query.ids_after
    return run.run_id == text or _holds(text, run.reason or "", run.run_id if is_recent else "")


def _suits(stored: StoredEvent, query: EventQuery) -> bool:
    event = stored.event
    return (
        event.type.startswith(_CHANNEL) is query.messages
        and query.type in (None, event.type)
        and query.source in (None, event.source)
        and query.id in (None, event.id)
        and (query.before is None or stored.seq < query.before)
        and (query.received_from is None or stored.received_at >= query.received_from)
        and (query.received_to is None or stored.received_at < query.received_to)
        and _holds(query.text, event.type, event.source, event.id)
    )


def _holds(text: str | None, *places: str) -> bool:
    return text is None or any(text.lower() in place.lower() for place in places)
