"""EddaApp: puts the parts together. The only module that picks a database."""

from __future__ import annotations

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

from edda.brokers import choose_sink
from edda.cloudevents.event import CloudEvent
from edda.control.controller import Controller
from edda.control.describing import describe_workflow
from edda.control.local import LocalController
from edda.core.codec import Codec
from edda.core.model import CancelOutcome, RunFilter
from edda.core.retry import DEFAULT_RETRY_POLICY, RetryPolicy
from edda.core.states import RunStatus
from edda.databases import open_sessions, open_storage, settings_for
from edda.engine.clock import Clock, DatabaseClock
from edda.engine.engine import Engine
from edda.engine.hooks import WorkflowHooks
from edda.engine.ids import Ids
from edda.engine.intake import run_of
from edda.engine.settings import Settings
from edda.engine.sinks import Sink
from edda.errors import AppError, MigrationError, UnknownWorkflowError
from edda.instances import InstancePage, Instances
from edda.storage.ports import Probe, Storage
from edda.web import State, Token, Web, Webhook, WebOptions, find_tokens
from edda.web.answers import Answer
from edda.web.api import controller_for
from edda.web.asgi import Receive, Scope, Send
from edda.web.callers import Caller
from edda.web.inside import Pages
from edda.web.request import Request
from edda.workflow.channels import publish
from edda.workflow.context import as_microseconds
from edda.workflow.current import Client, add_started, remove_started, set_fallback
from edda.workflow.handle import WorkflowHandle
from edda.workflow.handlers import as_workflow
from edda.workflow.sending import as_cloudevent, complete, describe_event
from edda.workflow.workflow import Starter, StartOptions, Workflow, registry

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
        probe: Probe | None = None,
        **ignored: Any,
    ) -> None:
        _refuse_unknown(ignored)
        self.service_name = service_name
        self.db_url = db_url or _url_of(engine) or os.environ.get("EDDA_DB_URL") or _DEFAULT_URL
        self._auto_migrate = auto_migrate
        self._with_worker = worker
        self._only = None if workflows is None else {w.name: w for w in workflows}
        self._codec = codec or Codec()
        self._settings = _with_retention(
            settings or settings_for(self.db_url), message_retention_days, run_retention_days
        )
        self._handlers: dict[str, list[Workflow[Any, Any]]] = {}
        self._web = Web(
            self,
            _with_access(_with_webhooks(web or WebOptions(), webhooks), auth, tokens),
            control=lambda: self.control,
            pages=_Pages(lambda caller: controller_for(self.control, caller)),
        )
        self._storage = storage or open_storage(self.db_url, pool_size=pool_size, probe=probe, now=_now_of(clock))
        self._sink = _sink_of(broker_url, sink, outbox_secret) if outbox_enabled else None
        self._open_sessions = partial(open_sessions, self.db_url, self._storage, engine, pool_size, probe)
        self._clock = clock or DatabaseClock()
        self._ids = ids or Ids()
        self._hooks = hooks
        self._retry_policy = default_retry_policy or DEFAULT_RETRY_POLICY
        self._redact = tuple(redact)
        self._engine: Engine | None = None
        self._control: LocalController | None = None
        self._leaving = False

    # Life

    async def initialize(self, *, worker: bool | None = None) -> None:
        """Open the database, bring its schema up to date, start the worker, unless told not to here or when the app
        was made. Does nothing the second time."""
        if self._engine is not None:
            return
        engine = self._make_engine()
        try:
            await self._storage.open()
            await self._prepare_schema()
            await engine.start(self._with_worker if worker is None else worker)
        except BaseException:  # whatever has begun must not go on by itself
            engine.kill()
            raise
        self._engine = engine
        add_started(engine)

    async def shutdown(self, grace: float | None = None) -> None:
        """Drain: steps under way may finish within the grace; everything else goes to other workers at once."""
        engine = self._engine
        if engine is None or self._leaving:
            return
        self._leaving = True  # steps that are finishing may still use the app
        try:
            await engine.stop(self._settings.shutdown_grace if grace is None else grace)
            await self._storage.close()
        finally:
            remove_started(engine)
            self._engine, self._leaving = None, False

    def kill(self) -> None:
        """Die without a word, as a crashed process does. For tests."""
        engine, self._engine = self._engine, None
        if engine is not None:
            remove_started(engine)
            engine.kill()
        else:
            self._storage.kill()

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def migrate(self) -> tuple[str, ...]:
        """Bring the schema up to date without starting anything; returns what was applied."""
        await self._storage.open()
        try:
            return await self._storage.migrate()
        finally:
            await self._storage.close()

    async def _prepare_schema(self) -> None:
        if self._auto_migrate:
            await self._storage.migrate()
        elif pending := await self._storage.pending_migrations():
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
        )

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise AppError(
                f"the app {self.service_name!r} is not started: use `async with app:` or `await app.initialize()`"
            )
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

    async def start(self, workflow: Workflow[P, R] | Starter[P, R], *args: P.args, **kwargs: P.kwargs) -> str:
        starter = workflow if isinstance(workflow, Starter) else Starter(workflow, StartOptions())
        return await starter.on(self.engine).start(*args, **kwargs)

    async def run(self, workflow: Workflow[P, R] | Starter[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        starter = workflow if isinstance(workflow, Starter) else Starter(workflow, StartOptions())
        return await starter.on(self.engine).run(*args, **kwargs)

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
            status=None if status is None else RunStatus(status),
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
        attributes = describe_event(
            event_type, source, data, datacontenttype, subject, time, dataschema, target_instance_id, extensions
        )
        event = complete(attributes, id, self.engine.new_id(), self.engine.now())
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
                await self.engine.await_end(run_of(workflow.name, known))

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
        await self._storage.now()


class _Pages:
    """The viewer, loaded when somebody looks: most processes show no page, and templates take a while to load."""

    def __init__(self, control: Callable[[Caller], Controller]) -> None:
        self._control = control

    async def answer(self, request: Request, caller: Caller | None, body: bytes = b"") -> Answer | None:
        return await self._viewer.answer(request, caller, body)

    def excuse(self, request: Request, caller: Caller | None, refusal: Answer) -> Answer:
        return self._viewer.excuse(request, caller, refusal)

    @cached_property
    def _viewer(self) -> Pages:
        from edda.viewer.pages import Viewer

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


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _IGNORED:
            raise TypeError(f"EddaApp() has no option {name!r}")


def _url_of(engine: AsyncEngine | None) -> str | None:
    return None if engine is None else engine.url.render_as_string(hide_password=False)


def _sink_of(broker_url: str | None, sink: Sink | None, secret: str | Sequence[str] | None) -> Sink | None:
    """Without a receiver events are stored all the same: a relayer elsewhere may know where they go."""
    if broker_url is None and sink is None:
        logger.warning("outbox_enabled without broker_url or sink: this app stores events, and sends none")
        return None
    return choose_sink(broker_url, sink, secret)


def _now_of(clock: Clock | None) -> Callable[[], int]:
    return clock.now if clock is not None else lambda: time.time_ns() // 1000


def _with_retention(settings: Settings, messages: float | None, runs: float | None) -> Settings:
    if messages is not None:
        settings = replace(settings, message_retention_days=messages)
    return settings if runs is None else replace(settings, run_retention_days=runs)


def _with_webhooks(options: WebOptions, webhooks: Iterable[Webhook]) -> WebOptions:
    return replace(options, webhooks=(*options.webhooks, *webhooks))


def _with_access(options: WebOptions, auth: str | None, tokens: str | Iterable[Token] | None) -> WebOptions:
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


set_fallback(_open_default)
