"""EddaApp: puts the parts together. The only module that picks a database."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from msgspec import UNSET

from edda.cloudevents.event import CloudEvent
from edda.control.code_graph.definition import describe_workflow
from edda.control.controller import Controller
from edda.control.local import LocalController
from edda.core.codec import Codec
from edda.core.logs import clean_logs
from edda.core.model import CancelOutcome, RunFilter
from edda.core.options import known_options, refuse_unknown
from edda.core.retry import DEFAULT_RETRY_POLICY, RetryPolicy
from edda.core.states import RunStatus
from edda.core.types.adapters import did_you_mean
from edda.core.urls import show_url
from edda.core.value_path import repr_short
from edda.databases import check_engine, open_sessions, open_storage, settings_for, url_of
from edda.engine.calls import CallLimit
from edda.engine.clock import Clock, DatabaseClock
from edda.engine.engine import Engine
from edda.engine.events.ingest import run_id_for_event
from edda.engine.hooks import WorkflowHooks
from edda.engine.ids import Ids
from edda.engine.outbox.sinks import Sink
from edda.engine.settings import Settings, check_whole
from edda.errors import AppError, MigrationError, UnknownWorkflowError
from edda.instances import InstancePage, Instances
from edda.storage.ports import StatementProbe, Storage
from edda.web import State, Token, WebApp, Webhook, WebOptions, find_tokens
from edda.web.api import controller_for
from edda.web.asgi import Receive, Scope, Send
from edda.web.internal import Viewer
from edda.web.request import Request
from edda.web.responses import Response
from edda.web.security.callers import Principal
from edda.workflow.channels import publish
from edda.workflow.client import Client, current_context, register_app, set_default_client, unregister_app
from edda.workflow.context import as_microseconds
from edda.workflow.event_handlers import as_workflow
from edda.workflow.handle import WorkflowHandle
from edda.workflow.send_event import as_cloudevent, event_attributes, finish_event
from edda.workflow.workflow import BoundWorkflow, Workflow, as_starter, registry

from .sink_urls import resolve_sink

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[..., Any] | Workflow[Any, Any])

logger = logging.getLogger(__name__)

_DEFAULT_URL = "sqlite:///edda.db"


class EddaApp:
    """One service on one database. `async with app:` runs its worker; leaving it drains.

    `redact` names fields of inputs, results and events that nobody is shown: "iban", "card.number", "*_key".

    Options of earlier frameworks that have no meaning here (`pool_timeout`, `leader_heartbeat_interval`, ...) are
    accepted and ignored.
    """

    def __init__(
        self,
        service_name: str = "edda",
        db_url: str | None = None,
        *,
        outbox_enabled: bool = False,
        broker_url: str | None = None,
        sink: Sink | None = None,
        outbox_secret: str | Sequence[str] | None = None,
        engine: AsyncEngine | None = None,
        hooks: WorkflowHooks | None = None,
        default_retry_policy: RetryPolicy | None = None,
        pool_size: int = 5,
        auto_migrate: bool = True,
        worker: bool = True,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
        message_retention_days: float | None = None,
        run_retention_days: float | None = None,
        auth: str | None = None,
        tokens: str | Iterable[Token] | None = None,
        webhooks: Iterable[Webhook] = (),
        web: WebOptions | None = None,
        redact: Iterable[str] = (),
        settings: Settings | None = None,
        codec: Codec | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        storage: Storage | None = None,
        probe: StatementProbe | None = None,
        **ignored: Any,
    ) -> None:
        refuse_unknown("EddaApp()", ignored.keys() - _IGNORED, known_options(EddaApp))
        _check_options(service_name, settings, hooks)
        check_whole("EddaApp", "pool_size", pool_size)
        self.service_name = service_name
        self.db_url = _choose_url(storage, db_url, engine)
        self._auto_migrate = auto_migrate
        self._with_worker = worker
        self._only = None if workflows is None else {w.name: w for w in map(_as_workflow, _as_list(workflows))}
        self._codec = codec or Codec()
        self._settings = _with_retention(
            settings or settings_for(self.db_url), message_retention_days, run_retention_days
        )
        self._limit = CallLimit(self._settings.call_timeout)
        self._handlers: dict[str, list[Workflow[Any, Any]]] = {}
        self._web = WebApp(
            self,
            _apply_auth(_with_webhooks(web or WebOptions(), webhooks), auth, tokens),
            control=lambda: self.control,
            pages=_LazyViewer(lambda caller: controller_for(self.control, caller)),
        )
        self._storage = storage or open_storage(
            self.db_url, pool_size=pool_size, probe=probe, now=_clock_or_system(clock)
        )
        self._sink = _resolve_sink(broker_url, sink, outbox_secret) if outbox_enabled else None
        self._open_sessions = partial(open_sessions, self._storage, engine, pool_size, probe)
        self._alchemy = engine
        self._clock = clock or DatabaseClock()
        self._ids = ids or Ids()
        self._hooks = hooks
        self._retry_policy = default_retry_policy or DEFAULT_RETRY_POLICY
        self._redact = tuple(redact)
        clean_logs(self._redact)  # also those of the storage's modules, which were imported just now
        self._engine: Engine | None = None
        self._control: LocalController | None = None
        self._starting: Engine | None = None
        self._leaving = False
        self._was_started = False
        self._lifecycle_lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    # Life

    async def initialize(self, *, worker: bool | None = None) -> None:
        """Open the database, bring its schema up to date, start the worker, unless told not to here or when the app
        was made. Does nothing the second time; called at once by several tasks, one of them starts it."""
        if self._engine is not None and (not self._leaving or current_context.get() is not None):
            return  # a step that is finishing while the app drains must not wait for the end of the drain
        async with self._lifecycle():
            if self._engine is None:
                await self._start_engine(self._with_worker if worker is None else worker)

    async def _start_engine(self, with_worker: bool) -> None:
        engine = self._starting = self._make_engine()
        try:
            async with self._limit.call(f"starting {self.service_name}: opening the database"):
                await self._storage.open()
            await self._prepare_schema()
            async with self._limit.call(f"starting {self.service_name}: registering its worker"):
                await engine.start(with_worker)
                if engine.worker is not None and self._alchemy is not None:
                    await check_engine(self.db_url, self._alchemy, engine.worker.worker_id)
            if self._starting is not engine:
                raise AppError(f"the app {self.service_name!r} was killed while it started")
        except BaseException:  # whatever has begun must not go on by itself
            engine.kill()
            raise
        finally:
            self._starting = None
        self._engine = engine
        self._was_started = True
        register_app(engine)

    async def shutdown(self, grace: float | None = None) -> None:
        """Drain: steps under way may finish within the grace; everything else goes to other workers at once. A second
        call waits for the first."""
        if current_context.get() is not None and self._leaving:
            return  # as in `initialize`
        async with self._lifecycle():
            if self._engine is not None:
                await self._stop_engine(self._engine, self._settings.shutdown_grace if grace is None else grace)

    async def _stop_engine(self, engine: Engine, grace: float) -> None:
        self._leaving = True  # steps that are finishing may still use the app
        try:
            await engine.stop(grace)
            await self._close_storage()
        except BaseException:  # cancelled, or the storage failed: no thread, task or connection may stay behind
            engine.kill()
            raise
        finally:
            unregister_app(engine)
            self._leaving = False
            if self._engine is engine:
                self._engine = None

    async def _close_storage(self) -> None:
        try:
            async with asyncio.timeout(self._limit.seconds):
                await self._storage.close()
        except TimeoutError:  # a server that does not answer, or a file that another process has locked
            self._storage.kill()

    def kill(self) -> None:
        """Die without a word, as a crashed process does. For tests."""
        engine, self._engine = self._engine or self._starting, None
        self._starting = None
        if engine is not None:
            unregister_app(engine)
            engine.kill()
        else:
            self._storage.kill()

    def _lifecycle(self) -> asyncio.Lock:
        """Starting and stopping go one after another. The lock belongs to the running event loop, because an app may
        be started again on another loop after the first one was closed."""
        loop = asyncio.get_running_loop()
        owner, lock = self._lifecycle_lock or (loop, asyncio.Lock())
        if owner is not loop:
            if lock.locked() and owner.is_running():
                raise AppError(
                    f"the app {self.service_name!r} is being started or stopped on another event loop: do both on one"
                )
            lock = asyncio.Lock()
        self._lifecycle_lock = (loop, lock)
        return lock

    if not TYPE_CHECKING:

        def __enter__(self):
            raise TypeError(f"the app {self.service_name!r} is used with `async with app:`, in an async function")

        def __exit__(self, *_):
            return None

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def migrate(self) -> tuple[str, ...]:
        """Bring the schema up to date without starting anything; returns what was applied."""
        async with self._lifecycle():
            if self._engine is not None:  # its storage is open, and stays so
                return await self._storage.migrate()
            async with self._limit.call(f"migrating the tables of {self.service_name}: opening the database"):
                await self._storage.open()
            try:
                return await self._storage.migrate()
            finally:
                await self._storage.close()

    async def _prepare_schema(self) -> None:
        async with self._limit.call(f"starting {self.service_name}: reading the version of its tables"):
            pending = await self._storage.pending_migrations()
        if pending and self._auto_migrate:
            await self._storage.migrate()  # for as long as it takes: a large table may have to be changed
        elif pending:
            raise MigrationError(
                f"{self.service_name}: the database lacks {', '.join(pending)}: run `edda migrate`, or use "
                "auto_migrate=True"
            )

    def _make_engine(self) -> Engine:
        return Engine(
            self._storage,
            service=self.service_name,
            clock=self._clock,
            codec=self._codec,
            ids=self._ids,
            settings=self._settings,
            retry_policy=self._retry_policy,
            hooks=self._hooks,
            find=self._find,
            names=self._names,
            handlers=self._handlers_of,
            open_sessions=self._open_sessions,
            sink=self._sink,
            describe=describe_workflow,
            database=show_url(self.db_url),
        )

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            state = "was shut down" if self._was_started else "is not started"
            raise AppError(f"the app {self.service_name!r} {state}: use `async with app:` or `await app.initialize()`")
        self._engine.check_loop()
        return self._engine

    @property
    def control(self) -> LocalController:
        """Everything that can be seen and done, as pages and the command line have it."""
        engine = self.engine
        if self._control is None or self._control.engine is not engine:
            self._control = LocalController(engine, find=self._find, names=self._names, redact=self._redact)
        return self._control

    def _find(self, name: str) -> Workflow[Any, Any]:
        if self._only is None:
            return registry.get(name)
        if name not in self._only:
            raise UnknownWorkflowError(f"the app {self.service_name!r} has no workflow {name!r}")
        return self._only[name]

    def _names(self) -> tuple[str, ...]:
        return registry.names() if self._only is None else tuple(self._only)

    # Runs

    async def start(self, workflow: Workflow[P, R] | BoundWorkflow[P, R], *args: P.args, **kwargs: P.kwargs) -> str:
        return await as_starter(workflow, "app.start").on(self.engine).start(*args, **kwargs)

    async def run(self, workflow: Workflow[P, R] | BoundWorkflow[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await as_starter(workflow, "app.run").on(self.engine).run(*args, **kwargs)
        return result

    def handle(self, instance_id: str) -> WorkflowHandle[Any]:
        return WorkflowHandle(instance_id, self.engine)

    async def cancel(self, instance_id: str, reason: str = "cancelled") -> bool:
        return await self.engine.request_cancel(instance_id, reason) is not CancelOutcome.ENDED

    async def find_instances(
        self,
        *,
        status: RunStatus | str | None = None,
        workflow_name: str | None = None,
        input_filters: Mapping[str, Any] | None = None,
        started_after: datetime | None = None,
        started_before: datetime | None = None,
        limit: int = 50,
        page_token: str | None = None,
    ) -> InstancePage:
        """Newest first. `input_filters` compares arguments by value: {"order_id": "A", "address.city": "Bonn"}."""
        filter = RunFilter(
            status=None if status is None else _as_status(status),
            workflow=workflow_name,
            created_from=None if started_after is None else as_microseconds(started_after),
            created_to=None if started_before is None else as_microseconds(started_before),
            limit=limit,
        )
        return await Instances(self.engine.find_runs, self._codec).find(filter, input_filters or {}, page_token)

    # Events

    def on_event(self, event_type: str) -> Callable[[H], H]:
        """Start a workflow, or call a function, for every event of a type: once, whatever crashes."""

        def register(handler: H) -> H:
            self._handlers.setdefault(event_type, []).append(as_workflow(handler))
            return handler

        return register

    async def send_event(
        self,
        event_type: str,
        source: str,
        data: Any = UNSET,
        datacontenttype: str | None = None,
        *,
        id: str | None = None,
        subject: str | None = None,
        time: datetime | str | None = None,
        dataschema: str | None = None,
        target_instance_id: str | None = None,
        extensions: Mapping[str, Any] | None = None,
        session: AsyncSession | None = None,
    ) -> str:
        """As `send_event`, into this app's database; returns the event's id when it is stored.

        With a `session` it is stored in that transaction, if and when it commits.
        """
        attributes = event_attributes(
            event_type, source, data, datacontenttype, subject, time, dataschema, target_instance_id, extensions
        )
        event = finish_event(attributes, id, self.engine.new_id(), self.engine.now())
        await self.engine.send(event, session)
        return event.id

    async def publish(
        self,
        channel: str,
        data: Any,
        metadata: Mapping[str, Any] | None = None,
        *,
        target_instance_id: str | None = None,
        session: AsyncSession | None = None,
    ) -> str:
        """As `publish(app, ...)`: the message's id when it is stored, or in the session's transaction."""
        return await publish(self, channel, data, metadata, target_instance_id=target_instance_id, session=session)

    async def handle_cloudevent(self, event: Any, wait: bool = False) -> None:
        """Take in an event that came some other way: one of ours, the JSON object as a dict, or an object of the
        CloudEvents SDK. With `wait` it returns when the runs that it starts have ended."""
        known = as_cloudevent(event)
        await self.engine.send(known)
        if wait:
            for workflow in self._handlers_of(known.type):
                await self.engine.await_end(run_id_for_event(workflow.name, known))

    def _handlers_of(self, event_type: str) -> Sequence[Workflow[Any, Any]]:
        named = [w for w in map(self._find, self._names()) if w.event_handler and w.name == event_type]
        return (*named, *self._handlers.get(event_type, ()))

    # HTTP

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: events in, `/cancel/...`, and below `/_edda` the page, the control API and health."""
        await self._web(scope, receive, send)

    def lifespan(self, host: object = None) -> AbstractAsyncContextManager[None]:
        """For the application this one is mounted in: `FastAPI(lifespan=app.lifespan)`."""
        return self._web.lifespan(host)

    def end_streams(self) -> None:
        """Let go of the pages that follow live: a server that stops waits for whoever is connected."""
        self._web.end_streams()

    @property
    def web_options(self) -> WebOptions:
        return self._web.options

    @property
    def state(self) -> State:
        if self._engine is None:
            return State.STOPPED
        return State.DRAINING if self._leaving else State.STARTED

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        await self.engine.receive(events)

    async def ping(self) -> None:
        async with self._limit.call("asking the database for its time"):
            await self._storage.now()


class _LazyViewer:
    """The viewer, loaded when somebody looks: most processes show no page, and templates take a while to load."""

    def __init__(self, control: Callable[[Principal], Controller]) -> None:
        self._control = control

    async def answer(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        return await self._viewer.answer(request, caller, body)

    def error_page(self, request: Request, caller: Principal | None, refusal: Response) -> Response:
        return self._viewer.error_page(request, caller, refusal)

    @cached_property
    def _viewer(self) -> Viewer:
        from edda.viewer.viewer import Viewer

        return Viewer(self._control)


_IGNORED = frozenset(
    {
        "max_overflow",
        "pool_timeout",
        "pool_recycle",
        "pool_pre_ping",
        "use_listen_notify",
        "notify_fallback_interval",
        "max_workflows_per_batch",
        "leader_heartbeat_interval",
        "leader_lease_duration",
    }
)


def _check_options(service_name: Any, settings: Any, hooks: Any) -> None:
    if not isinstance(service_name, str) or "://" in service_name:
        shown_name = show_url(service_name) if isinstance(service_name, str) else service_name
        raise ValueError(
            f"EddaApp({shown_name!r}): the first argument is the name of the service, the second the URL of its "
            'database: EddaApp("shop", "sqlite:///shop.db")'
        )
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"EddaApp(settings={repr_short(settings)}): expected edda.engine.settings.Settings(lease=30)")
    if isinstance(hooks, type):
        raise TypeError(f"EddaApp(hooks={hooks.__name__}): expected an object, not its class: hooks={hooks.__name__}()")


def _as_status(status: RunStatus | str) -> RunStatus:
    known = [str(one) for one in RunStatus]
    if status not in known:
        hint = did_you_mean(str(status), known) or f"; expected one of {', '.join(known)}"
        raise ValueError(f"find_instances(status={status!r}): no such status{hint}")
    return RunStatus(status)


def _as_list(workflows: Any) -> Iterable[Any]:
    if isinstance(workflows, Workflow):
        raise TypeError(f"EddaApp(workflows={workflows.name}): expected a list of workflows: [{workflows.name}]")
    if isinstance(workflows, str) or not isinstance(workflows, Iterable):
        raise TypeError(f"EddaApp(workflows={repr_short(workflows)}): expected a list of workflows")
    return workflows


def _as_workflow(one: Any) -> Workflow[Any, Any]:
    if not isinstance(one, Workflow):
        raise TypeError(
            f"EddaApp(workflows=...): {repr_short(one)} is no workflow; list the decorated functions themselves"
        )
    return one


def _choose_url(storage: Storage | None, given: str | None, engine: AsyncEngine | None) -> str:
    """A storage knows its database, whatever else is said of one."""
    if storage is not None:
        return storage.url
    if given == "":  # most often of a variable that is not set: another database would be used without a word
        raise ValueError("EddaApp(db_url=''): the URL of the database is empty; leave it out for EDDA_DB_URL")
    return given or (url_of(engine) if engine is not None else None) or os.environ.get("EDDA_DB_URL") or _DEFAULT_URL


def _resolve_sink(broker_url: str | None, sink: Sink | None, secret: str | Sequence[str] | None) -> Sink | None:
    """Without a receiver events are stored all the same: a relayer elsewhere may know where they go."""
    if broker_url is None and sink is None:
        logger.warning("outbox_enabled without broker_url or sink: this app stores events, and sends none")
        return None
    return resolve_sink(broker_url, sink, secret)


def _clock_or_system(clock: Clock | None) -> Callable[[], int]:
    return clock.now if clock is not None else lambda: time.time_ns() // 1000


def _with_retention(settings: Settings, messages: float | None, runs: float | None) -> Settings:
    if messages is not None:
        settings = replace(settings, message_retention_days=messages)
    return settings if runs is None else replace(settings, run_retention_days=runs)


def _with_webhooks(options: WebOptions, webhooks: Iterable[Webhook]) -> WebOptions:
    return replace(options, webhooks=(*options.webhooks, *webhooks))


def _apply_auth(options: WebOptions, auth: str | None, tokens: str | Iterable[Token] | None) -> WebOptions:
    if auth is None:
        auth = options.auth
    known = options.tokens if options.tokens and tokens is None else find_tokens(tokens)
    return replace(options, auth=auth, tokens=() if auth == "none" and tokens is None else known)


def _open_default() -> AbstractAsyncContextManager[Client] | None:
    return _default_client() if os.environ.get("EDDA_DB_URL") else None


@asynccontextmanager
async def _default_client() -> AsyncIterator[Client]:
    async with EddaApp(worker=False) as app:
        yield app.engine


set_default_client(_open_default)
