"""The controller in this process: on an engine, which need not have a worker, and on its database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
from msgspec import UNSET

from edda.cloudevents.event import CloudEvent, make
from edda.cloudevents.json_format import parse_stored
from edda.control.code_graph.definition import describe_workflow
from edda.core.channels import Message, check_channel, event_type, is_message, unpack_message
from edda.core.model import MICROSECONDS, CancelOutcome, Entry, OutboxState, RunId, RunRecord, StoredEvent
from edda.core.queries import Audit, Definition, EventQuery, EventReceiver, Generation, RunQuery, WaitRow, WorkerRecord
from edda.core.redact import Redaction
from edda.core.states import ENDED, RunStatus
from edda.engine.engine import Engine
from edda.engine.events.ingest import run_id_for_event
from edda.errors import (
    ActionRefusedError,
    ArgumentError,
    EventError,
    NotFoundError,
    OutcomeUnknownError,
    StorageConflictError,
    StorageUnavailableError,
)
from edda.workflow.context import as_datetime
from edda.workflow.send_event import event_attributes
from edda.workflow.workflow import Workflow

from .arguments import parse_arguments
from .bulk import act_on_all
from .change_feed import ChangeFeed
from .presenters import Presenter, allowed_actions, to_datetime
from .run_search import RunSearcher, check_limit, read_search, to_bound, write_cursor
from .status_text import retried_step
from .timeline import TimelineInput, build_timeline, is_channel, last_progress_at
from .views import (
    ActionResult,
    AuditView,
    BulkOrder,
    ChannelView,
    DefinitionView,
    EntryView,
    EventDetail,
    EventOrder,
    EventSearch,
    EventView,
    HistorySearch,
    MessageOrder,
    OutboxOrder,
    OutgoingView,
    Page,
    RetryOrder,
    RunDetail,
    RunSearch,
    RunView,
    StartRequest,
    StatsView,
    Timeline,
    WaitView,
    WorkerView,
)

T = TypeVar("T")

QUERY_SECONDS = 5.0
"""What takes longer is given up: a page must not keep a database busy that has runs to serve."""
MOST_CHILDREN = 100
TAIL_ENTRIES = 50
MOST_CONSUMERS = 200
BUCKETS = 60
BUCKET = 60 * MICROSECONDS
MAX_SAMPLED = 1_000
MOST_DETAILS = 2_000
_CHANGES = frozenset({"delete", "drop_outgoing", "note", "retry_outgoing"})
"""What is asked of the storage and changes something."""
_WAITING = (
    RunStatus.WAITING_FOR_EVENT,
    RunStatus.WAITING_FOR_MESSAGE,
)


class LocalController:
    """`find` and `names` say which workflows have their code here; `redact` names fields that are secret.

    Every action leaves an audit row under the name `who`; `with_caller` gives the same controller under another one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        find: Callable[[str], Workflow[Any, Any]],
        names: Callable[[], Sequence[str]],
        redact: Iterable[str] = (),
        who: str = "local",
        origin: str = "",
    ) -> None:
        self.engine = engine
        self._storage = engine.calls.bound(engine.storage, _CHANGES)
        self._find = find
        self._names = names
        self._who = who
        self._origin = origin
        redaction = Redaction(redact)
        self._display = Presenter(engine.codec, redaction)
        self._finder = RunSearcher(self._storage, engine.codec, redaction)
        self._watch = ChangeFeed(engine.storage.change_token)

    def with_caller(self, who: str, origin: str) -> Self:
        other = copy(self)
        other._who, other._origin = who, origin
        return other

    async def _with_timeout(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(QUERY_SECONDS):
                return await answer
        except TimeoutError:
            raise StorageUnavailableError(
                f"the database did not answer within {QUERY_SECONDS:g} seconds: ask for less, or later"
            ) from None

    async def _audit(self, action: str, subject: str, details: Any = None) -> None:
        asked = self._display.payloads.present(msgspec.to_builtins(details))  # as plain data: secrets are found by name
        text = "" if details is None else msgspec.json.encode(asked).decode()
        try:
            at = await self._storage.now()
            await self._storage.add_audit(Audit(at, self._who, action, subject, self._origin, text[:MOST_DETAILS]))
        except (StorageUnavailableError, StorageConflictError) as error:
            raise OutcomeUnknownError(
                f"{action} {subject} was done, but the database did not answer when that was to be noted in the audit "
                f"log ({error}): do not do it again"
            ) from error

    # Runs

    async def list_runs(self, search: RunSearch) -> Page[RunView]:
        found = await self._with_timeout(self._finder.find(search))
        now, crew = await self._storage.now(), await self._crew_of(found.runs)
        # A bound is exclusive: that moment itself is to be searched yet.
        horizon = None if found.searched_to is None else to_datetime(found.searched_to + 1)
        shown = tuple(self._display.run(record, now, crew) for record in found.runs)
        return Page(shown, write_cursor(found.after), horizon)

    async def _crew_of(self, runs: Sequence[RunRecord]) -> tuple[WorkerRecord, ...]:
        """The workers, if any of the runs has an owner: those of a worker that died say so."""
        return (
            await self._with_timeout(self._storage.list_workers()) if any(run.owner is not None for run in runs) else ()
        )

    async def count_runs(self, search: RunSearch) -> dict[str, int]:
        read_search(search)  # what is wrong in it is said, though those of every status are counted
        every = msgspec.structs.replace(search, status=())
        return {status.value: count for status, count in (await self._with_timeout(self._finder.count(every))).items()}

    async def get_run(self, run_id: str) -> RunDetail:
        record = await self.engine.read_run(run_id)
        now, id = await self._storage.now(), record.run_id
        children = await self._with_timeout(self._storage.search(RunQuery(parent=id, limit=MOST_CHILDREN)))
        crew = await self._crew_of([record, *children])
        generations, payloads = await self._storage.generations(id), self._display.payloads
        is_completed = record.status is RunStatus.COMPLETED
        return RunDetail(
            run=self._display.run(
                record,
                now,
                crew,
                since=await self._waiting_since(record, generations),
                tried=await self._last_failed_attempt(record, generations),
            ),
            input=payloads.value(record.input),
            result=payloads.value(record.value) if is_completed else None,
            error=self._display.error(record),
            facts=payloads.present(
                {fact.name: payloads.value(fact.value) for fact in await self._storage.run_values(id)}
            ),
            waits=await self._waits_of(record),
            generations=tuple(map(self._display.generation, generations)),
            children=tuple(self._display.run(child, now, crew) for child in children),
            may=allowed_actions(record.status),
        )

    async def _waiting_since(self, record: RunRecord, generations: Sequence[Generation]) -> int | None:
        if record.status not in _WAITING:
            return None
        # The last lines tell, unless a step that goes on beside the wait has filled them.
        for after in (_tail_start(record, generations), -1):
            moved = last_progress_at(await self._storage.history(record.run_id, record.gen, after=after))
            if moved is not None:
                return moved
        return record.created_at

    async def _last_failed_attempt(self, record: RunRecord, generations: Sequence[Generation]) -> Entry | None:
        """How it went, of a step that is tried again."""
        step = retried_step(record)
        if step is None:
            return None
        lines = await self._storage.history(
            record.run_id, record.gen, step=step, after=_tail_start(record, generations)
        )
        return next((entry for entry in reversed(lines) if not entry.ok), None)

    async def _waits_of(self, record: RunRecord) -> tuple[WaitView, ...]:
        if record.status in ENDED:
            return ()
        waits = await self._storage.waits(record.run_id)
        return await self._show_waits([WaitRow(record.run_id, record.workflow, wait) for wait in waits])

    async def _show_waits(self, standing: Sequence[WaitRow]) -> tuple[WaitView, ...]:
        schemas: dict[str, dict[str, Any]] = {}
        for workflow in {one.workflow for one in standing}:
            forms = await self._storage.event_schemas(workflow)
            schemas[workflow] = {form.type: msgspec.json.decode(form.schema) for form in forms}
        return tuple(self._display.wait(one, schemas[one.workflow]) for one in standing)

    async def get_history(self, run_id: str, search: HistorySearch) -> Page[EntryView]:
        limit, after = check_limit(search.limit), _read_number(search.cursor)
        found = await self._with_timeout(
            self._storage.history(
                RunId(run_id),
                search.generation,
                step=search.step or None,
                after=-1 if after is None else after,
                limit=limit + 1,
            )
        )
        known = await self._secrets_of(run_id)
        if not found and search.generation is not None:
            await self._generation_started_at(RunId(run_id), search.generation)
        last = str(found[limit - 1].seq) if len(found) > limit else None
        return Page(tuple(self._display.entry(entry, known) for entry in found[:limit]), last)

    async def _generation_started_at(self, run_id: RunId, gen: int) -> int:
        """When this generation began."""
        begun = {one.gen: one.created_at for one in await self._storage.generations(run_id)}
        if gen not in begun:
            raise NotFoundError(f"run {run_id} has no generation {gen}")
        return begun[gen]

    async def get_timeline(self, run_id: str, generation: int | None = None) -> Timeline:
        record = await self.engine.read_run(run_id)
        gen = record.gen if generation is None else generation
        created = await self._generation_started_at(record.run_id, gen)
        history = await self._with_timeout(self._storage.history(record.run_id, gen))
        waits = await self._storage.waits(record.run_id) if gen == record.gen else ()
        now, display = await self._storage.now(), self._display
        failed = (entry.input for entry in history if not entry.ok)
        explain = partial(display.payloads.error, known=display.payloads.secrets(record.input, *failed))
        glance = TimelineInput(record, gen, created, waits, now, explain, display.child_of)
        return build_timeline(history, glance)

    async def export_run(self, run_id: str) -> dict[str, Any]:
        detail = await self.get_run(run_id)
        histories = {str(one.number): await self._whole_history(run_id, one.number) for one in detail.generations}
        exported: dict[str, Any] = msgspec.to_builtins({"detail": detail, "histories": histories}, str_keys=True)
        return exported

    async def _whole_history(self, run_id: str, generation: int) -> tuple[EntryView, ...]:
        history = await self._with_timeout(self._storage.history(RunId(run_id), generation))
        known = await self._secrets_of(run_id)
        return tuple(self._display.entry(entry, known) for entry in history)

    async def _secrets_of(self, run_id: str) -> frozenset[str]:
        return self._display.payloads.secrets((await self.engine.read_run(run_id)).input)

    async def start_run(self, order: StartRequest) -> ActionResult:
        workflow = await self._find_workflow(order.workflow)
        try:
            starter = workflow.options(id=order.id or None).on(self.engine)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        arguments = parse_arguments(workflow.name, workflow.signature, order.input)
        run_id = await starter.start(**arguments)
        await self._audit("start", run_id, {"workflow": order.workflow, "input": order.input})
        return ActionResult(True, f"started {order.workflow}", 1, run_id)

    async def _find_workflow(self, name: str) -> Workflow[Any, Any]:
        if name in self._names():
            return self._find(name)
        if any(known.workflow == name for known in await self._storage.definitions()):
            raise ActionRefusedError(f"this process lacks the code of {name}: start it at a process that runs it")
        known = ", ".join(sorted(self._names())) or "none"
        raise NotFoundError(f"no workflow is named {name!r}; known here are: {known}")

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult:
        was_parked = (await self.engine.read_run(run_id)).status is RunStatus.PARKED
        outcome = await self.engine.request_cancel(run_id, reason)
        if outcome is CancelOutcome.ENDED:
            raise ActionRefusedError(f"run {run_id} has ended: there is nothing to cancel")
        await self._audit("cancel", run_id, {"reason": reason})
        asked = "is asked to stop" if outcome is CancelOutcome.REQUESTED else "was asked to stop before"
        unread = "; it is parked, and if its code still does not fit its history it ends without compensation"
        return ActionResult(True, f"run {run_id} {asked}{unread if was_parked else ''}", 1, run_id)

    async def retry_run(self, run_id: str, order: RetryOrder) -> ActionResult:
        await self.engine.retry_run(run_id, order.from_start)
        await self._audit("retry", run_id, {"from_start": order.from_start})
        return ActionResult(True, f"run {run_id} {'begins anew' if order.from_start else 'goes on'}", 1, run_id)

    async def resume_run(self, run_id: str) -> ActionResult:
        await self.engine.resume_run(run_id)
        await self._audit("resume", run_id)
        return ActionResult(True, f"run {run_id} is replayed with its current code", 1, run_id)

    async def delete_run(self, run_id: str) -> ActionResult:
        if not await self._storage.delete(RunId(run_id)):
            status = (await self.engine.read_run(run_id)).status
            raise ActionRefusedError(f"run {run_id} is {status.value}: only a run that has ended can be deleted")
        await self._audit("delete", run_id)
        return ActionResult(True, f"run {run_id} is deleted", 1, run_id)

    async def act_on_runs(self, order: BulkOrder) -> ActionResult:
        done = await act_on_all(self, self._finder, order)
        if not order.count_only:
            await self._audit(f"{order.action} many", f"{done.count} runs", order)
        return done

    # Events, channels, the outbox

    async def list_events(self, search: EventSearch) -> Page[EventView]:
        limit = check_limit(search.limit)
        query = EventQuery(
            type=search.type or None,
            source=search.source or None,
            id=search.id or None,
            text=search.q or None,
            received_from=to_bound(search.since, "since"),
            received_to=to_bound(search.until, "until"),
            messages=search.messages,
            before=_read_number(search.cursor),
            limit=limit + 1,
        )
        found = await self._with_timeout(self._storage.find_events(query))
        last = str(found[limit - 1].seq) if len(found) > limit else None
        return Page(tuple(map(self._display.event, found[:limit])), last)

    async def get_event(self, number: int) -> EventDetail:
        stored = await self._read_event(number)
        attributes, data = self._display.attributes_and_data(stored)
        consumers = await self._started_by(stored) + await self._with_timeout(
            self._storage.consumers(number, MOST_CONSUMERS)
        )
        return EventDetail(self._display.event(stored), attributes, data, tuple(map(self._display.consumer, consumers)))

    async def _started_by(self, stored: StoredEvent) -> tuple[EventReceiver, ...]:
        """Known by their ids, which are made from the event and the workflow's name."""
        if is_message(stored.event):
            return ()
        told = await self._with_timeout(self._storage.definitions())
        names = {*self._names(), *(one.workflow for one in told)}
        records = [await self._storage.get(run_id_for_event(name, stored.event)) for name in sorted(names)]
        begun = [record for record in records if record is not None]
        return tuple(EventReceiver(record.run_id, record.workflow, "", stored.received_at) for record in begun)

    async def _read_event(self, number: int) -> StoredEvent:
        stored = await self._with_timeout(self._storage.event(number))
        if stored is None:
            raise NotFoundError(f"no event has the number {number}; it may have been removed as too old")
        return stored

    async def send_event(self, order: EventOrder) -> ActionResult:
        await self._check_target(order.target)
        data = UNSET if order.data is None else order.data
        attributes = event_attributes(
            order.type, order.source, data, None, order.subject, None, None, order.target, order.extensions
        )
        try:
            event = make(id=order.id or self.engine.new_id(), **{**attributes, "time": self.engine.now().isoformat()})
        except (EventError, ValueError, TypeError) as error:
            raise ArgumentError(str(error)) from None
        await self._receive(event)
        await self._audit("send event", event.id, order)
        return ActionResult(True, f"event {event.id} is stored", 1, event.id)

    async def _receive(self, event: CloudEvent) -> None:
        try:
            await self.engine.receive((event,))
        except EventError as error:
            raise ArgumentError(str(error)) from None

    async def resend_event(self, number: int) -> ActionResult:
        stored = await self._read_event(number)
        id, codec = self.engine.new_id(), self.engine.codec
        if is_message(stored.event):
            await self.engine.publish(_renewed(unpack_message(codec, stored.event.body), id, self.engine.microseconds))
        else:
            await self._receive(msgspec.structs.replace(parse_stored(codec.decrypt(stored.event.body)), id=id))
        await self._audit("resend event", id, {"number": number, "id": stored.event.id})
        return ActionResult(True, f"event {number} was sent again as {id}", 1, id)

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> Page[WaitView]:
        after = _read_place(cursor)
        found = await self._with_timeout(self._storage.list_waits(type or None, after, check_limit(limit) + 1))
        last = found[limit - 1] if len(found) > limit else None
        following = None if last is None else msgspec.json.encode([last.run_id, last.wait.step]).decode()
        return Page(await self._show_waits(found[:limit]), following)

    async def list_channels(self) -> tuple[ChannelView, ...]:
        """Those of the newest messages, and those that somebody waits for."""
        messages = await self._with_timeout(self._storage.find_events(EventQuery(messages=True, limit=MAX_SAMPLED)))
        standing = await self._with_timeout(self._storage.list_waits(None, None, MAX_SAMPLED))
        newest = {stored.event.type: stored.received_at for stored in reversed(messages)}
        waited = [one.wait.type for one in standing if is_channel(one.wait.type)]
        prefix = len(event_type(""))
        return tuple(
            ChannelView(type[prefix:], waited.count(type), to_datetime(newest.get(type)))
            for type in sorted({*newest, *waited})
        )

    async def publish_message(self, order: MessageOrder) -> ActionResult:
        try:
            check_channel(order.channel)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        target = order.target or None
        await self._check_target(target)
        id, now = self.engine.new_id(), self.engine.microseconds
        await self.engine.publish(Message(id, order.channel, target, order.data, order.metadata, now))
        await self._audit("publish message", id, order)
        return ActionResult(True, f"message {id} is on {order.channel}", 1, id)

    async def _check_target(self, target: str | None) -> None:
        if target and (await self.engine.read_run(target)).status in ENDED:
            raise ActionRefusedError(f"run {target} has ended: nobody would receive it")

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> Page[OutgoingView]:
        try:
            wanted = OutboxState(state) if state else None
        except ValueError:
            raise ArgumentError(f"state {state!r}: expected one of {', '.join(OutboxState)}") from None
        after = _read_number(cursor) or 0
        found = await self._with_timeout(self._storage.find_outbox(wanted, after, check_limit(limit) + 1))
        last = str(found[limit - 1].seq) if len(found) > limit else None
        return Page(tuple(map(self._display.outgoing, found[:limit])), last)

    async def retry_outbox(self, order: OutboxOrder) -> ActionResult:
        count = await self._storage.retry_outbox(None if order.every else await self._named(order))
        await self._storage.notify()
        await self._audit("retry outbox", f"{count} events", order)
        return ActionResult(count > 0, f"{count} dead events are sent again", count)

    async def drop_outbox(self, order: OutboxOrder) -> ActionResult:
        count = await self._storage.delete_outbox(await self._dead() if order.every else await self._named(order))
        await self._audit("drop outbox", f"{count} events", order)
        return ActionResult(count > 0, f"{count} dead events are forgotten", count)

    async def _named(self, order: OutboxOrder) -> tuple[str, ...]:
        if not order.ids:
            raise ArgumentError("which events? Give their ids, or say every=true")
        if unknown := set(order.ids).difference(await self._dead()):
            raise NotFoundError(
                f"no dead event of the outbox has the id {', '.join(sorted(unknown))}: nothing was done"
            )
        return order.ids

    async def _dead(self) -> tuple[str, ...]:
        """The ids of all of them."""
        ids: list[str] = []
        last = 0
        while dead := await self._with_timeout(self._storage.find_outbox(OutboxState.DEAD, last, 10_000)):
            ids += (record.event.id for record in dead)
            last = dead[-1].seq
        return tuple(ids)

    # The whole

    async def list_workers(self) -> tuple[WorkerView, ...]:
        return tuple(map(self._display.worker, await self._with_timeout(self._storage.list_workers())))

    async def list_definitions(self) -> tuple[DefinitionView, ...]:
        told = {one.workflow: one for one in await self._with_timeout(self._storage.definitions())}
        names = frozenset(self._names())
        # A process without a worker tells nobody of its code, but whoever asks it may know.
        for name in names - told.keys():
            await asyncio.sleep(0)  # not in a thread, see `describe_workflow`; others get their turn after each
            details = describe_workflow(self._find(name))
            told[name] = Definition(name, "", details, self.engine.clock.now())
        return tuple(self._display.definition(told[name], names) for name in sorted(told))

    async def get_definition(self, workflow: str) -> DefinitionView:
        for known in await self.list_definitions():
            if known.workflow == workflow:
                return known
        raise NotFoundError(f"no workflow is named {workflow!r}, or no worker that has its code was ever started")

    async def get_stats(self) -> StatsView:
        storage, now = self._storage, await self._storage.now()
        since = now // BUCKET * BUCKET - (BUCKETS - 1) * BUCKET
        counts = await self._with_timeout(storage.count(RunQuery()))
        backlog = await self._with_timeout(storage.backlog())
        latency = await self._with_timeout(storage.latency(since, MAX_SAMPLED))
        buckets = await self._with_timeout(storage.throughput(since, BUCKET, BUCKETS))
        workers = await self._with_timeout(storage.list_workers())
        return StatsView(
            at=as_datetime(now),
            counts={status.value: count for status, count in counts.items()},
            buckets=tuple(map(self._display.bucket, buckets)),
            median_ms=latency.median / 1000 if latency.runs else None,
            p95_ms=latency.p95 / 1000 if latency.runs else None,
            ready=backlog.ready,
            oldest_ready=to_datetime(backlog.oldest_ready),
            oldest_wait=to_datetime(backlog.oldest_wait),
            parked=backlog.parked,
            outbox_pending=backlog.outbox_pending,
            outbox_dead=backlog.outbox_dead,
            oldest_outgoing=to_datetime(backlog.oldest_outgoing),
            dispatches=backlog.dispatches,
            workers=sum(not worker.is_lapsed for worker in workers),
        )

    async def list_audits(self, cursor: str | None, limit: int) -> Page[AuditView]:
        found = await self._with_timeout(self._storage.audits(_read_number(cursor), check_limit(limit) + 1))
        last = str(found[limit - 1].seq) if len(found) > limit else None
        return Page(tuple(map(self._display.audit, found[:limit])), last)

    @property
    def is_watched(self) -> bool:
        return self._watch.is_looking

    async def watch(self) -> AsyncGenerator[str, None]:
        async with aclosing(self._watch.changes()) as marks:
            async for mark in marks:
                yield mark


def _tail_start(record: RunRecord, generations: Sequence[Generation]) -> int:
    """After which line the newest begin."""
    lines = sum(one.entries for one in generations if one.gen == record.gen)
    return max(-1, lines - TAIL_ENTRIES)


def _renewed(message: Message, id: str, now: int) -> Message:
    return msgspec.structs.replace(message, id=id, published_at=now, offer=0)


def _read_number(cursor: str | None) -> int | None:
    if not cursor:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise ArgumentError(f"cursor {cursor!r}: expected what the page before gave as `next`")
    return int(cursor)


def _read_place(cursor: str | None) -> tuple[str, str] | None:
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str]) if cursor else None
    except ValueError:
        raise ArgumentError(f"cursor {cursor!r}: expected what the page before gave as `next`") from None
