"""`LocalController`: the control interface on the engine of this process, which need not have a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from edda.cloudevents.event import CloudEvent, make
from edda.cloudevents.json_format import parse_stored
from edda.control.code_graph import describe_workflow
from edda.core.channels import Message, check_channel, event_type, is_message, unpack_message
from edda.core.model import MICROSECONDS, CancelOutcome, Entry, OutboxState, RunId, RunRecord, StoredEvent, Wait
from edda.core.queries import Audit, Definition, EventQuery, EventReceiver, Generation, RunQuery, WaitRow, WorkerRecord
from edda.core.redact import Redaction
from edda.core.signature import Signature
from edda.core.states import ENDED, RunStatus
from edda.core.validation import ValidationFailure, validate
from edda.engine.engine import Engine
from edda.engine.events import run_id_for_event
from edda.engine.retry_plan import has_compensated
from edda.errors import (
    ActionRefusedError,
    ArgumentError,
    EventError,
    InstanceNotFoundError,
    NotFoundError,
    OutcomeUnknownError,
    StorageConflictError,
    StorageUnavailableError,
)
from edda.workflow.context import as_datetime
from edda.workflow.send_event import event_attributes
from edda.workflow.workflow import Workflow

from . import views
from .change_feed import ChangeFeed
from .presenters import ALLOWED_ACTIONS, Presenter, to_datetime
from .run_search import (
    RunSearcher,
    check_limit,
    number_page,
    read_number,
    read_place,
    read_search,
    to_bound,
    write_cursor,
)
from .status_text import MAX_DETAIL_LENGTH, count_of, retried_step
from .timeline import TimelineInput, build_timeline, is_channel, last_progress_at

T = TypeVar("T")

QUERY_SECONDS = 5.0
"""Upper bound of one query: a page must not keep a database busy that has runs to serve."""
MAX_IDS = 1_000
"""Ids of one request for many runs."""
MAX_FOUND = 10_000
"""Runs of one search for many runs."""
MAX_CHILDREN = 100
TAIL_ENTRIES = 50
MAX_CONSUMERS = 200
BUCKETS = 60
BUCKET = 60 * MICROSECONDS
MAX_SAMPLED = 1_000
MAX_DETAILS = 2_000
STORAGE_CHANGES = frozenset({"add_audit", "delete", "delete_outbox", "retry_outbox"})
"""Storage methods called here that change something: without an answer their outcome is unknown."""
_WAITING = (
    RunStatus.WAITING_FOR_EVENT,
    RunStatus.WAITING_FOR_MESSAGE,
)


class _StoredRun(Struct, frozen=True):
    """What the detail and the timeline of a run both show: a page with both reads it once."""

    record: RunRecord
    now: int
    generations: Sequence[Generation]
    waits: Sequence[Wait]


class LocalController:
    """`find` and `names` give the workflows whose code is loaded here; `redact` names secret fields.

    Every action inserts an audit row with the name `who`; `with_caller` returns the same controller for another name.
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
        self._client = engine.client
        self._storage = engine.calls.bound(engine.storage, STORAGE_CHANGES)
        self._find = find
        self._names = names
        self._who = who
        self._origin = origin
        redaction = Redaction(redact)
        self._presenter = Presenter(engine.codec, redaction)
        self._searcher = RunSearcher(self._storage, engine.codec, redaction)
        self._changes = ChangeFeed(engine.storage.change_token)

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
                f"the database did not answer within {QUERY_SECONDS:g} seconds: narrow the search, or try again later"
            ) from None

    async def _audit(
        self, action: str, subject: str, words: str, details: Any = None, count: int | None = None
    ) -> views.ActionResult:
        """Inserts the audit row of an action that was done. `count` is None if it was done to the subject alone."""
        shown = self._presenter.payloads.present(msgspec.to_builtins(details))  # secrets are found by field name
        text = "" if details is None else msgspec.json.encode(shown).decode()
        try:
            at = await self._storage.now()
            await self._storage.add_audit(Audit(at, self._who, action, subject, self._origin, text[:MAX_DETAILS]))
        except (StorageUnavailableError, StorageConflictError) as error:
            raise OutcomeUnknownError(
                f"{action} {subject} was done, but the database did not answer when its audit row was inserted "
                f"({error}): do not repeat it"
            ) from error
        if count is None:
            return views.ActionResult(True, words, 1, subject)
        return views.ActionResult(count > 0, words, count)

    # Runs

    async def list_runs(self, search: views.RunSearch) -> views.Page[views.RunView]:
        found = await self._with_timeout(self._searcher.find(search))
        now, workers = await self._storage.now(), await self._workers_of(found.runs)
        # The bound is exclusive: runs of that microsecond itself were not searched.
        searched_to = None if found.searched_to is None else to_datetime(found.searched_to + 1)
        shown = tuple(self._presenter.run(record, now, workers) for record in found.runs)
        return views.Page(shown, write_cursor(found.after), searched_to)

    async def _workers_of(self, runs: Sequence[RunRecord]) -> tuple[WorkerRecord, ...]:
        """All workers, if any of the runs has an owner: the status text names an owner that is dead."""
        if all(run.owner is None for run in runs):
            return ()
        return await self._with_timeout(self._storage.list_workers())

    async def count_runs(self, search: views.RunSearch) -> dict[str, int]:
        read_search(search)  # validates the status too, though every status is counted
        counts = await self._with_timeout(self._searcher.count(replace(search, status=())))
        return {status.value: count for status, count in counts.items()}

    async def get_run(self, run_id: str) -> views.RunDetail:
        return await self._detail(await self._read_stored(run_id))

    async def get_run_and_timeline(
        self, run_id: str, generation: int | None = None
    ) -> tuple[views.RunDetail, views.Timeline]:
        stored = await self._read_stored(run_id)
        history = await self._read_generation(stored, generation)
        is_newest = generation in (None, stored.record.generation)
        return await self._detail(stored, history if is_newest else None), self._timeline(stored, generation, history)

    async def _read_stored(self, run_id: str) -> _StoredRun:
        record = await self._client.read_run(run_id)
        now, generations = await self._storage.now(), await self._storage.generations(record.run_id)
        waits = () if record.status in ENDED else await self._storage.waits(record.run_id)
        return _StoredRun(record, now, generations, waits)

    async def _detail(self, stored: _StoredRun, history: Sequence[Entry] | None = None) -> views.RunDetail:
        """`history` is that of the newest generation, if it was read already."""
        record, now, generations, payloads = stored.record, stored.now, stored.generations, self._presenter.payloads
        children = await self._with_timeout(self._storage.search(RunQuery(parent=record.run_id, limit=MAX_CHILDREN)))
        workers = await self._workers_of([record, *children])
        is_completed = record.status is RunStatus.COMPLETED
        return views.RunDetail(
            run=self._presenter.run(
                record,
                now,
                workers,
                since=await self._waiting_since(record, generations, history),
                tried=await self._last_failed_attempt(record, generations, history),
                max_length=MAX_DETAIL_LENGTH,
            ),
            input=payloads.value(record.input),
            result=payloads.value(record.value) if is_completed else None,
            error=self._presenter.error(record),
            values=payloads.present(
                {one.name: payloads.value(one.value) for one in await self._storage.run_values(record.run_id)}
            ),
            waits=await self._show_waits([WaitRow(record.run_id, record.workflow, wait) for wait in stored.waits]),
            generations=tuple(
                views.GenerationView(one.generation, as_datetime(one.created_at), one.entries) for one in generations
            ),
            children=tuple(self._presenter.run(child, now, workers) for child in children),
            may=ALLOWED_ACTIONS.get(record.status, ()),
            from_start_only=await self._has_compensated(record, generations, history),
        )

    async def _waiting_since(
        self, record: RunRecord, generations: Sequence[Generation], history: Sequence[Entry] | None
    ) -> int | None:
        if record.status not in _WAITING:
            return None
        if history is not None:
            return last_progress_at(history) or record.created_at
        # The last entries suffice, unless they are all heartbeats of a step beside the wait.
        for after in (_tail_start(record, generations), -1):
            since = last_progress_at(await self._storage.history(record.run_id, record.generation, after=after))
            if since is not None:
                return since
        return record.created_at

    async def _last_failed_attempt(
        self, record: RunRecord, generations: Sequence[Generation], history: Sequence[Entry] | None
    ) -> Entry | None:
        """The last failed attempt of the step whose retry the run waits for."""
        step = retried_step(record)
        if step is None:
            return None
        if history is None:
            history = await self._storage.history(
                record.run_id, record.generation, step=step, after=_tail_start(record, generations)
            )
        return next((entry for entry in reversed(history) if entry.step == step and not entry.ok), None)

    async def _has_compensated(
        self, record: RunRecord, generations: Sequence[Generation], history: Sequence[Entry] | None
    ) -> bool:
        """Whether a failed or cancelled run ended with compensations, which are its last entries."""
        if "retry" not in ALLOWED_ACTIONS.get(record.status, ()):
            return False
        if history is None:
            after = _tail_start(record, generations)
            history = await self._storage.history(record.run_id, record.generation, after=after)
        return has_compensated(history)

    async def _show_waits(self, rows: Sequence[WaitRow]) -> tuple[views.WaitView, ...]:
        schemas: dict[str, dict[str, Any]] = {}
        for workflow in {row.workflow for row in rows}:
            stored = await self._storage.event_schemas(workflow)
            schemas[workflow] = {one.type: msgspec.json.decode(one.schema) for one in stored}
        return tuple(self._presenter.wait(row, schemas[row.workflow]) for row in rows)

    async def get_history(self, run_id: str, search: views.HistorySearch) -> views.Page[views.EntryView]:
        limit, after = check_limit(search.limit), read_number(search.cursor)
        found = await self._with_timeout(
            self._storage.history(
                RunId(run_id),
                search.generation,
                step=search.step or None,
                after=-1 if after is None else after,
                limit=limit + 1,
            )
        )
        known = self._presenter.payloads.secrets((await self._client.read_run(run_id)).input)
        if not found and search.generation is not None:
            _started_at(run_id, search.generation, await self._storage.generations(RunId(run_id)))
        return number_page(found, limit, lambda entry: self._presenter.entry(entry, known))

    async def get_timeline(self, run_id: str, generation: int | None = None) -> views.Timeline:
        stored = await self._read_stored(run_id)
        return self._timeline(stored, generation, await self._read_generation(stored, generation))

    async def _read_generation(self, stored: _StoredRun, generation: int | None) -> tuple[Entry, ...]:
        number = stored.record.generation if generation is None else generation
        return await self._with_timeout(self._storage.history(stored.record.run_id, number))

    def _timeline(self, stored: _StoredRun, generation: int | None, history: Sequence[Entry]) -> views.Timeline:
        record, presenter = stored.record, self._presenter
        generation = record.generation if generation is None else generation
        created = _started_at(record.run_id, generation, stored.generations)
        waits = stored.waits if generation == record.generation else ()
        now = max([stored.now, *(entry.at for entry in history[-1:])])  # entries may have been written since
        failed = (entry.input for entry in history if not entry.ok)
        explain = partial(presenter.payloads.error, known=presenter.payloads.secrets(record.input, *failed))
        return build_timeline(
            history, TimelineInput(record, generation, created, waits, now, explain, presenter.child_of)
        )

    async def export_run(self, run_id: str) -> dict[str, Any]:
        detail = await self.get_run(run_id)
        known = self._presenter.payloads.secrets((await self._client.read_run(run_id)).input)
        histories = {}
        for one in detail.generations:
            history = await self._with_timeout(self._storage.history(RunId(run_id), one.number))
            histories[str(one.number)] = [self._presenter.entry(entry, known) for entry in history]
        exported: dict[str, Any] = msgspec.to_builtins({"detail": detail, "histories": histories}, str_keys=True)
        return exported

    async def start_run(self, request: views.StartRequest) -> views.ActionResult:
        workflow = await self._find_workflow(request.workflow)
        try:
            starter = workflow.options(id=request.id or None).on(self._client)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        run_id = await starter.start(**_parse_arguments(workflow.name, workflow.signature, request.input))
        details = {"workflow": request.workflow, "input": request.input}
        return await self._audit("start", run_id, f"started {request.workflow}", details)

    async def _find_workflow(self, name: str) -> Workflow[Any, Any]:
        if name in self._names():
            return self._find(name)
        if any(known.workflow == name for known in await self._storage.definitions()):
            raise ActionRefusedError(
                f"this process does not have the code of {name}: start it in a process that has it"
            )
        known = ", ".join(sorted(self._names())) or "none"
        raise NotFoundError(f"no workflow is named {name!r}; known here: {known}")

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> views.ActionResult:
        was_parked = (await self._client.read_run(run_id)).status is RunStatus.PARKED
        outcome = await self._client.request_cancel(run_id, reason)
        if outcome is CancelOutcome.ENDED:
            raise ActionRefusedError(f"run {run_id} has ended: there is nothing to cancel")
        is_first = outcome is CancelOutcome.REQUESTED
        text = "is being cancelled" if is_first else "was cancelled before, and has not ended yet"
        if was_parked:
            text += "; it is parked, and if its code still does not fit its history it ends without compensation"
        return await self._audit("cancel", run_id, f"run {run_id} {text}", {"reason": reason})

    async def retry_run(self, run_id: str, request: views.RetryRequest) -> views.ActionResult:
        await self._client.retry_run(run_id, request.from_start)
        text = "starts again from its input" if request.from_start else "continues"
        return await self._audit("retry", run_id, f"run {run_id} {text}", {"from_start": request.from_start})

    async def resume_run(self, run_id: str) -> views.ActionResult:
        await self._client.resume_run(run_id)
        return await self._audit("resume", run_id, f"run {run_id} is replayed with its current code")

    async def delete_run(self, run_id: str) -> views.ActionResult:
        if not await self._storage.delete(RunId(run_id)):
            status = (await self._client.read_run(run_id)).status
            raise ActionRefusedError(f"run {run_id} is {status.value}: only a run that has ended can be deleted")
        return await self._audit("delete", run_id, f"run {run_id} is deleted")

    async def act_on_runs(self, request: views.BulkRequest) -> views.ActionResult:
        act = self._action_of(request)
        if request.count_only:
            count = await self._count(request)
            return views.ActionResult(False, f"would {request.action} {count_of(count, 'run')}", count)
        done, refusals = 0, 0
        async for run_id in self._ids_of(request):
            try:
                await act(run_id)
                done += 1
            except (ActionRefusedError, InstanceNotFoundError):
                refusals += 1
        runs = count_of(done, "run")
        refused = f"; {count_of(refusals, 'run')} refused" if refusals else ""
        return await self._audit(
            f"{request.action} many", runs, f"{request.action}: {runs} done{refused}", request, done
        )

    def _action_of(self, request: views.BulkRequest) -> Callable[[str], Awaitable[views.ActionResult]]:
        actions: dict[str, Callable[[str], Awaitable[views.ActionResult]]] = {
            "cancel": lambda run_id: self.cancel_run(run_id, request.reason),
            "retry": lambda run_id: self.retry_run(run_id, views.RetryRequest(request.from_start)),
            "resume": self.resume_run,
            "delete": self.delete_run,
        }
        if request.action not in actions:
            raise ArgumentError(f"action {request.action!r}: expected one of {', '.join(actions)}")
        if bool(request.ids) == (request.search is not None):
            raise ArgumentError("ids, search: expected exactly one of them")
        if len(request.ids) > MAX_IDS:
            raise ArgumentError(f"ids: {len(request.ids):,} are given, expected at most {MAX_IDS:,}")
        return actions[request.action]

    async def _count(self, request: views.BulkRequest) -> int:
        if request.search is None:
            return len(set(request.ids))
        return min(sum((await self._searcher.count(request.search, MAX_FOUND)).values()), MAX_FOUND)

    async def _ids_of(self, request: views.BulkRequest) -> AsyncIterator[str]:
        for run_id in dict.fromkeys(request.ids):
            yield run_id
        if request.search is not None:
            async for record in self._searcher.iterate(request.search, MAX_FOUND):
                yield record.run_id

    # Events, channels, the outbox

    async def list_events(self, search: views.EventSearch) -> views.Page[views.EventView]:
        limit = check_limit(search.limit)
        query = EventQuery(
            type=search.type or None,
            source=search.source or None,
            id=search.id or None,
            text=search.q or None,
            received_from=to_bound(search.since, "since"),
            received_to=to_bound(search.until, "until"),
            messages=search.messages,
            before=read_number(search.cursor),
            limit=limit + 1,
        )
        found = await self._with_timeout(self._storage.find_events(query))
        return number_page(found, limit, self._presenter.event)

    async def get_event(self, number: int) -> views.EventDetail:
        stored = await self._read_event(number)
        attributes, data = self._presenter.attributes_and_data(stored)
        consumers = await self._started_by(stored) + await self._with_timeout(
            self._storage.consumers(number, MAX_CONSUMERS)
        )
        shown = tuple(views.ConsumerView(one.run_id, one.workflow, one.step, as_datetime(one.at)) for one in consumers)
        return views.EventDetail(self._presenter.event(stored), attributes, data, shown)

    async def _started_by(self, stored: StoredEvent) -> tuple[EventReceiver, ...]:
        """Runs that the event started: their ids are derived from the event and the workflow's name."""
        if is_message(stored.event):
            return ()
        definitions = await self._with_timeout(self._storage.definitions())
        names = {*self._names(), *(one.workflow for one in definitions)}
        records = [await self._storage.get(run_id_for_event(name, stored.event)) for name in sorted(names)]
        started = [record for record in records if record is not None]
        return tuple(EventReceiver(record.run_id, record.workflow, "", stored.received_at) for record in started)

    async def _read_event(self, number: int) -> StoredEvent:
        stored = await self._with_timeout(self._storage.event(number))
        if stored is None:
            raise NotFoundError(f"no event has the number {number}; it may have been pruned")
        return stored

    async def send_event(self, request: views.EventRequest) -> views.ActionResult:
        await self._check_target(request.target)
        data = UNSET if request.data is None else request.data
        attributes = event_attributes(
            request.type, request.source, data, None, request.subject, None, None, request.target, request.extensions
        )
        try:
            attributes["time"] = self._client.now().isoformat()
            event = make(id=request.id or self._client.new_id(), **attributes)
        except (EventError, ValueError, TypeError) as error:
            raise ArgumentError(str(error)) from error
        await self._receive(event)
        return await self._audit("send event", event.id, f"event {event.id} is stored", request)

    async def _receive(self, event: CloudEvent) -> None:
        try:
            await self._client.receive((event,))
        except EventError as error:
            raise ArgumentError(str(error)) from error

    async def resend_event(self, number: int) -> views.ActionResult:
        stored = await self._read_event(number)
        id, codec = self._client.new_id(), self.engine.codec
        if is_message(stored.event):
            message = unpack_message(codec, stored.event.body)
            await self._client.publish(replace(message, id=id, published_at=self._client.microseconds, offer=0))
        else:
            await self._receive(replace(parse_stored(codec.decrypt(stored.event.body)), id=id))
        details = {"number": number, "id": stored.event.id}
        return await self._audit("resend event", id, f"event {number} was sent again as {id}", details)

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> views.Page[views.WaitView]:
        after = read_place(cursor)
        found = await self._with_timeout(self._storage.list_waits(type or None, after, check_limit(limit) + 1))
        last = found[limit - 1] if len(found) > limit else None
        following = None if last is None else msgspec.json.encode([last.run_id, last.wait.step]).decode()
        return views.Page(await self._show_waits(found[:limit]), following)

    async def list_channels(self) -> tuple[views.ChannelView, ...]:
        """Channels of the newest messages and of registered waits."""
        messages = await self._with_timeout(self._storage.find_events(EventQuery(messages=True, limit=MAX_SAMPLED)))
        waits = await self._with_timeout(self._storage.list_waits(None, None, MAX_SAMPLED))
        newest = {stored.event.type: stored.received_at for stored in reversed(messages)}
        waited = [row.wait.type for row in waits if is_channel(row.wait.type)]
        prefix = len(event_type(""))
        return tuple(
            views.ChannelView(type[prefix:], waited.count(type), to_datetime(newest.get(type)))
            for type in sorted({*newest, *waited})
        )

    async def publish_message(self, request: views.MessageRequest) -> views.ActionResult:
        try:
            check_channel(request.channel)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        target = request.target or None
        await self._check_target(target)
        id, now = self._client.new_id(), self._client.microseconds
        await self._client.publish(Message(id, request.channel, target, request.data, request.metadata, now))
        return await self._audit("publish message", id, f"message {id} is on {request.channel}", request)

    async def _check_target(self, target: str | None) -> None:
        if target and (await self._client.read_run(target)).status in ENDED:
            raise ActionRefusedError(f"run {target} has ended and receives nothing any more")

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> views.Page[views.OutboxView]:
        try:
            wanted = OutboxState(state) if state else None
        except ValueError:
            raise ArgumentError(f"state {state!r}: expected one of {', '.join(OutboxState)}") from None
        after = read_number(cursor) or 0
        found = await self._with_timeout(self._storage.find_outbox(wanted, after, check_limit(limit) + 1))
        return number_page(found, limit, self._presenter.outbox_event)

    async def retry_outbox(self, request: views.OutboxRequest) -> views.ActionResult:
        count = await self._storage.retry_outbox(None if request.every else await self._named(request))
        await self._storage.notify()
        text = f"{count} dead {'event is' if count == 1 else 'events are'} sent again"
        return await self._audit("retry outbox", count_of(count, "event"), text, request, count)

    async def drop_outbox(self, request: views.OutboxRequest) -> views.ActionResult:
        count = await self._storage.delete_outbox(await self._dead() if request.every else await self._named(request))
        text = f"{count} dead {'event is' if count == 1 else 'events are'} deleted"
        return await self._audit("drop outbox", count_of(count, "event"), text, request, count)

    async def _named(self, request: views.OutboxRequest) -> tuple[str, ...]:
        if not request.ids:
            raise ArgumentError("no events are named: give their ids, or every=true")
        if unknown := set(request.ids).difference(await self._dead()):
            raise NotFoundError(
                f"no dead event of the outbox has the id {', '.join(sorted(unknown))}: nothing was done"
            )
        return request.ids

    async def _dead(self) -> tuple[str, ...]:
        """The ids of all dead events."""
        ids: list[str] = []
        last = 0
        while dead := await self._with_timeout(self._storage.find_outbox(OutboxState.DEAD, last, 10_000)):
            ids += (record.event.id for record in dead)
            last = dead[-1].seq
        return tuple(ids)

    # Workers, workflows, statistics, audit log

    async def list_workers(self) -> tuple[views.WorkerView, ...]:
        return tuple(map(self._presenter.worker, await self._with_timeout(self._storage.list_workers())))

    async def list_definitions(self) -> tuple[views.DefinitionView, ...]:
        stored = {one.workflow: one for one in await self._with_timeout(self._storage.definitions())}
        names = frozenset(self._names())
        # A process without a worker stores no definitions; those of its own code are made here.
        for name in names - stored.keys():
            await asyncio.sleep(0)  # parsing must not run in a thread, see `describe_workflow`; yield between two
            details = describe_workflow(self._find(name))
            stored[name] = Definition(name, "", details, self.engine.clock.now())
        return tuple(self._presenter.definition(stored[name], names) for name in sorted(stored))

    async def get_definition(self, workflow: str) -> views.DefinitionView:
        for known in await self.list_definitions():
            if known.workflow == workflow:
                return known
        raise NotFoundError(f"no workflow is named {workflow!r}, or no worker that has its code was ever started")

    async def get_stats(self) -> views.StatsView:
        storage, now = self._storage, await self._storage.now()
        since = now // BUCKET * BUCKET - (BUCKETS - 1) * BUCKET
        counts = await self._with_timeout(storage.count(RunQuery()))
        backlog = await self._with_timeout(storage.backlog())
        latency = await self._with_timeout(storage.latency(since, MAX_SAMPLED))
        buckets = await self._with_timeout(storage.throughput(since, BUCKET, BUCKETS))
        workers = await self._with_timeout(storage.list_workers())
        return views.StatsView(
            at=as_datetime(now),
            counts={status.value: count for status, count in counts.items()},
            buckets=tuple(
                views.BucketView(as_datetime(one.since), one.started, one.completed, one.failed, one.cancelled)
                for one in buckets
            ),
            median_ms=latency.median / 1000 if latency.runs else None,
            p95_ms=latency.p95 / 1000 if latency.runs else None,
            ready=backlog.ready,
            oldest_ready=to_datetime(backlog.oldest_ready),
            oldest_wait=to_datetime(backlog.oldest_wait),
            parked=backlog.parked,
            outbox_pending=backlog.outbox_pending,
            outbox_dead=backlog.outbox_dead,
            oldest_outbox=to_datetime(backlog.oldest_outbox),
            staged_events=backlog.staged_events,
            workers=sum(not worker.is_lapsed for worker in workers),
        )

    async def list_audits(self, cursor: str | None, limit: int) -> views.Page[views.AuditView]:
        found = await self._with_timeout(self._storage.audits(read_number(cursor), check_limit(limit) + 1))
        return number_page(found, limit, self._presenter.audit)

    def watch(self) -> AsyncGenerator[str, None]:
        return self._changes.watch()


def _started_at(run_id: str, generation: int, generations: Sequence[Generation]) -> int:
    started = {one.generation: one.created_at for one in generations}
    if generation not in started:
        raise NotFoundError(f"run {run_id} has no generation {generation}")
    return started[generation]


def _tail_start(record: RunRecord, generations: Sequence[Generation]) -> int:
    """The number after which the last `TAIL_ENTRIES` entries begin."""
    entries = sum(one.entries for one in generations if one.generation == record.generation)
    return max(-1, entries - TAIL_ENTRIES)


def _parse_arguments(workflow: str, signature: Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, validated against the annotations; raises an `ArgumentError` that names every wrong field."""
    errors = [f"{name}: is required" for name in signature.required if name not in given]
    if not signature.takes_any:
        errors += [f"{name}: the workflow has no such parameter" for name in given if name not in signature.names]
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if name not in signature.parameters:
            arguments[name] = value
            continue
        try:
            arguments[name] = validate(value, msgspec.json.encode(value), signature.parameters[name])
        except ValidationFailure as failure:
            errors += [f"{_field_path(name, path)}: {message}" for path, message in failure.errors]
    if errors:
        raise ArgumentError(f"{workflow} cannot be started with this input:\n  " + "\n  ".join(errors))
    return arguments


def _field_path(name: str, path: str) -> str:
    return name if path == "$" else f"{name}{path if path.startswith('[') else f'.{path}'}"
