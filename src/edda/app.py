"""EddaApp: connects the database, the engine, the worker and the HTTP endpoints of one service."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from msgspec import UNSET

from edda.cloudevents.event import CloudEvent
from edda.control.code_graph import describe_workflow
from edda.control.local import LocalController
from edda.control.run_search import InstancePage, find_instances
from edda.core.codec import Codec
from edda.core.model import CancelOutcome, RunFilter
from edda.core.options import known_options, refuse_unknown
from edda.core.redact import clean_logs, show_url
from edda.core.retry import DEFAULT_RETRY_POLICY, RetryPolicy
from edda.core.states import RunStatus
from edda.core.value_path import did_you_mean, repr_short
from edda.databases import (
    check_engine,
    choose_url,
    close_storage,
    open_sessions,
    open_storage,
    prepare_schema,
    settings_for,
    system_time,
)
from edda.engine.client import CallLimit, EngineClient, Ids
from edda.engine.clock import Clock, DatabaseClock
from edda.engine.engine import Engine
from edda.engine.events import run_id_for_event
from edda.engine.hooks import HookCaller, WorkflowHooks
from edda.engine.outbox.sinks import Sink
from edda.engine.services import EngineServices, LazySessions, WorkflowLookup
from edda.engine.settings import Settings, check_whole
from edda.errors import AppError, UnknownWorkflowError
from edda.outbox import resolve_sink
from edda.storage.ports import StatementProbe, Storage
from edda.web import State, Token, WebApp, Webhook, WebOptions, find_tokens
from edda.web.internal import PageViewer
from edda.web.responses import Receive, Scope, Send
from edda.workflow.channels import publish
from edda.workflow.client import Client, current_context, register_app, set_default_client, unregister_app
from edda.workflow.context import as_microseconds
from edda.workflow.events import as_workflow
from edda.workflow.send_event import as_cloudevent, event_attributes, finish_event
from edda.workflow.workflow import BoundWorkflow, Workflow, WorkflowHandle, as_starter, registry

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[..., Any] | Workflow[Any, Any])

logger = logging.getLogger(__name__)


class EddaApp:
    """One service on one database. `async with app:` starts its worker; leaving the block drains and stops it.

    The app is also an ASGI application.

    Args:
        service_name: Name of the service, stored beside its workers. Default "edda".
        db_url: URL of the database: "sqlite:///shop.db", "postgresql://...", "mysql://..." or "memory://". Default:
            the URL of `engine`, else the environment variable EDDA_DB_URL, else "sqlite:///edda.db".
        outbox_enabled: Send the events in the outbox to `broker_url` or `sink`. Default False: another process, such
            as an `OutboxRelayer`, sends them.
        broker_url: Receiver of outbox events: "https://..." or "nats://host:port/stream?subject=...". Default None.
        sink: Receiver of outbox events as an object, instead of `broker_url`. Default None.
        outbox_secret: Signs requests to `broker_url`: one secret "whsec_...", or several. Default None: unsigned.
        engine: SQLAlchemy `AsyncEngine` on the same database, for `ctx.session`. Default None: made on demand.
        hooks: Object with methods of `WorkflowHooks`, called when runs and steps start and end. Default None.
        default_retry_policy: Policy of activities without their own. Default None: `RetryPolicy()`.
        pool_size: Connections to PostgreSQL or MySQL; SQLite ignores it. Default 5.
        auto_migrate: Create and update the tables when the app starts. Default True; with False a missing migration
            raises `MigrationError`.
        worker: Run workflows in this process. Default True; with False the app starts, reads and cancels runs only.
        workflows: The workflows that this app knows. Default None: all that the process has imported.
        message_retention_days: Days that events are kept. Default None: that of `settings`, 7.
        run_retention_days: Days that ended runs are kept. Default None: that of `settings`, which keeps them forever.
        auth: "none" serves HTTP requests without authentication. Default None: requests need a token; without
            `tokens` only requests from this machine are served.
        tokens: Tokens for HTTP requests, as text in the format of EDDA_TOKENS or as `Token` objects. Default None:
            the environment variable EDDA_TOKENS.
        webhooks: Paths that accept signed webhooks of other services. Default: none.
        web: Limits and names of the HTTP endpoints. Default None: `WebOptions()`.
        redact: Names of fields whose values are hidden on pages, in exports, logs and error texts: "iban",
            "card.number", "*_key". Passwords, tokens and similar names are always hidden. Default: none.
        settings: Leases, limits and intervals of the engine. Default None: `Settings()`, adjusted for SQLite.
        codec: Size limit and encryption of stored values: `Codec(max_bytes=..., transform=...)`. Default None:
            2 MiB, no encryption.
        clock: Replaces the database's clock; for tests. Default None.
        ids: Generates the ids of runs and workers; for tests. Default None.
        storage: A storage object, instead of `db_url`. Default None.
        probe: Called before and after each statement; for crash tests. Default None.
        **ignored: Options of other frameworks that have no effect here (`pool_timeout`, `leader_lease_duration`, ...).
            Any other name raises `TypeError`.
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
        # The storage's URL has precedence: it is the database that is used.
        self.db_url = storage.url if storage is not None else choose_url("EddaApp", db_url, engine)
        self._auto_migrate = auto_migrate
        self._with_worker = worker
        self._only = None if workflows is None else _by_name(workflows)
        self._codec = codec or Codec()
        retention = {"message_retention_days": message_retention_days, "run_retention_days": run_retention_days}
        given: dict[str, Any] = {name: days for name, days in retention.items() if days is not None}
        self._settings = replace(settings or settings_for(self.db_url), **given)
        self._limit = CallLimit(self._settings.call_timeout)
        self._handlers: dict[str, list[Workflow[Any, Any]]] = {}
        self._web = WebApp(
            self,
            _web_options(web or WebOptions(), webhooks, auth, tokens),
            control=lambda: self.control,
            viewer=lambda: self._viewer,
        )
        now = system_time if clock is None else clock.now
        self._storage = storage or open_storage(self.db_url, pool_size=pool_size, probe=probe, now=now)
        self._sink = _resolve_sink(broker_url, sink, outbox_secret) if outbox_enabled else None
        self._open_sessions = partial(open_sessions, self._storage, engine, pool_size, probe)
        self._alchemy = engine
        self._clock = clock or DatabaseClock()
        self._ids = ids or Ids()
        self._hooks = hooks
        self._retry_policy = default_retry_policy or DEFAULT_RETRY_POLICY
        self._redact = tuple(redact)
        clean_logs(self._redact)  # again: opening the storage imported modules with new loggers
        self._engine: Engine | None = None
        self._control: LocalController | None = None
        self._starting: Engine | None = None
        self._leaving = False
        self._was_started = False
        self._lifecycle_lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    # Starting and stopping

    async def initialize(self, *, worker: bool | None = None) -> None:
        """Open the database, apply migrations, and start the worker.

        `worker` overrides the option of the constructor. A second call does nothing; of several concurrent calls one
        starts the app, and the others wait for it.
        """
        if self._engine is not None and (not self._leaving or current_context.get() is not None):
            return  # a step that runs while the app drains must not wait for the end of the drain: that is a deadlock
        async with self._lifecycle():
            if self._engine is None:
                await self._start_engine(self._with_worker if worker is None else worker)

    async def _start_engine(self, with_worker: bool) -> None:
        engine = self._starting = self._make_engine()
        try:
            async with self._limit.call(f"starting {self.service_name}: opening the database"):
                await self._storage.open()
            await prepare_schema(self._storage, self._limit, self.service_name, self._auto_migrate)
            async with self._limit.call(f"starting {self.service_name}: registering its worker"):
                await engine.start(with_worker)
                if engine.worker is not None and self._alchemy is not None:
                    await check_engine(self.db_url, self._alchemy, engine.worker.worker_id)
            if self._starting is not engine:
                raise AppError(f"the app {self.service_name!r} was killed while it started")
        except BaseException:  # tasks that have started must not continue without an app
            engine.kill()
            raise
        finally:
            self._starting = None
        self._engine = engine
        self._was_started = True
        register_app(engine.client)

    async def shutdown(self, grace: float | None = None) -> None:
        """Drain and stop: running steps get `grace` seconds to finish (default: `Settings.shutdown_grace`), all other
        runs are released to other workers at once. A second call waits for the first."""
        if current_context.get() is not None and self._leaving:
            return  # called by a step while the app drains: see `initialize`
        async with self._lifecycle():
            if self._engine is not None:
                await self._stop_engine(self._engine, self._settings.shutdown_grace if grace is None else grace)

    async def _stop_engine(self, engine: Engine, grace: float) -> None:
        self._leaving = True  # running steps can still use the app
        try:
            await engine.stop(grace)
            await close_storage(self._storage, self._limit)
        except BaseException:  # cancelled, or the storage failed: leave no thread, task or connection behind
            engine.kill()
            raise
        finally:
            unregister_app(engine.client)
            self._leaving = False
            if self._engine is engine:
                self._engine = None

    def kill(self) -> None:
        """Stop at once without releasing runs or the lease, like a crashed process. For tests."""
        engine, self._engine = self._engine or self._starting, None
        self._starting = None
        if engine is not None:
            unregister_app(engine.client)
            engine.kill()
        else:
            self._storage.kill()

    def _lifecycle(self) -> asyncio.Lock:
        """The lock that serialises starting and stopping. It belongs to the running event loop, because an app may be
        started again on another loop after the first one was closed."""
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
        """Apply pending migrations without starting the app; returns their names."""
        async with self._lifecycle():
            if self._engine is not None:  # the storage is open already, and stays open
                return await self._storage.migrate()
            async with self._limit.call(f"migrating the tables of {self.service_name}: opening the database"):
                await self._storage.open()
            try:
                return await self._storage.migrate()
            finally:
                await self._storage.close()

    def _make_engine(self) -> Engine:
        services = EngineServices(
            storage=self._storage,
            clock=self._clock,
            codec=self._codec,
            ids=self._ids,
            settings=self._settings,
            retry_policy=self._retry_policy,
            registry=WorkflowLookup(self._find, self._names, self._handlers_of),
            service=self.service_name,
            database=show_url(self.db_url),
            hooks=None if self._hooks is None else HookCaller(self._hooks),
            sessions=LazySessions(self._open_sessions),
        )
        return Engine(services, sink=self._sink, describe=describe_workflow)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            state = "was shut down" if self._was_started else "is not started"
            raise AppError(f"the app {self.service_name!r} {state}: use `async with app:` or `await app.initialize()`")
        self._engine.client.check_loop()
        return self._engine

    @property
    def client(self) -> EngineClient:
        """The operations that workflows and handles use; for Edda's own functions."""
        return self.engine.client

    @property
    def control(self) -> LocalController:
        """The operations of the viewer and the command line: search, inspect, cancel, retry, and so on."""
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
        """Store a new run of the workflow, or of `workflow.options(...)`, and return its id."""
        return await as_starter(workflow, "app.start").on(self.client).start(*args, **kwargs)

    async def run(self, workflow: Workflow[P, R] | BoundWorkflow[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Start a run and wait for its result; raises the run's error."""
        result: R = await as_starter(workflow, "app.run").on(self.client).run(*args, **kwargs)
        return result

    def handle(self, instance_id: str) -> WorkflowHandle[Any]:
        """A handle on the run with this id; the database is not asked whether it exists."""
        return WorkflowHandle(instance_id, self.client)

    async def cancel(self, instance_id: str, reason: str = "cancelled") -> bool:
        """Request the cancellation of a run; False if it has ended already."""
        return await self.client.request_cancel(instance_id, reason) is not CancelOutcome.ENDED

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
        """Search runs, newest first.

        Args:
            status: Only runs in this status, such as "completed". Default None: all.
            workflow_name: Only runs of this workflow. Default None: all.
            input_filters: Values of arguments by path: {"order_id": "A", "address.city": "Bonn"}. Default None.
            started_after, started_before: Aware datetimes that the start must lie between. Default None: no limit.
            limit: Runs per page, 1 to 1000. Default 50.
            page_token: `next_page_token` of the page before. Default None: the first page.
        """
        filter = RunFilter(
            status=None if status is None else _as_status(status),
            workflow=workflow_name,
            created_from=None if started_after is None else as_microseconds(started_after),
            created_to=None if started_before is None else as_microseconds(started_before),
            limit=limit,
        )
        return await find_instances(self.client.find_runs, self._codec, filter, input_filters or {}, page_token)

    # Events

    def on_event(self, event_type: str) -> Callable[[H], H]:
        """Decorator: start the workflow, or call the function in a run of its own, once for every event of a type."""

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
        """Like `edda.send_event`, into this app's database; returns the event's id after the commit.

        With a `session` of SQLAlchemy the event is stored in that transaction, and exists when it commits.
        """
        attributes = event_attributes(
            event_type, source, data, datacontenttype, subject, time, dataschema, target_instance_id, extensions
        )
        event = finish_event(attributes, id, self.client.new_id(), self.client.now())
        await self.client.send(event, session)
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
        """Like `edda.publish(app, ...)`: store a message on a channel, or in the session's transaction; returns its
        id."""
        return await publish(self, channel, data, metadata, target_instance_id=target_instance_id, session=session)

    async def handle_cloudevent(self, event: Any, wait: bool = False) -> None:
        """Store an event that another transport received: a `CloudEvent`, its JSON object as a dict, or an object of
        the CloudEvents SDK. With `wait` it returns when the runs that the event starts have ended."""
        known = as_cloudevent(event)
        await self.client.send(known)
        if wait:
            for workflow in self._handlers_of(known.type):
                await self.client.await_end(run_id_for_event(workflow.name, known))

    def _handlers_of(self, event_type: str) -> Sequence[Workflow[Any, Any]]:
        named = [w for w in map(self._find, self._names()) if w.event_handler and w.name == event_type]
        return (*named, *self._handlers.get(event_type, ()))

    # HTTP

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: it accepts events and `/cancel/...`, and serves viewer, control API and health below
        `/_edda`."""
        await self._web(scope, receive, send)

    def lifespan(self, host: object = None) -> AbstractAsyncContextManager[None]:
        """Lifespan for the application that this one is mounted in: `FastAPI(lifespan=app.lifespan)`."""
        return self._web.lifespan(host)

    def end_streams(self) -> None:
        """Close the event streams of live pages. A server calls it when it stops, because it waits for open
        connections."""
        self._web.end_streams()

    @property
    def web_options(self) -> WebOptions:
        return self._web.options

    @property
    def state(self) -> State:
        if self._engine is None:
            return State.STOPPED
        return State.DRAINING if self._leaving else State.STARTED

    @cached_property
    def _viewer(self) -> PageViewer:
        from edda.viewer.viewer import Viewer  # on the first page request: most processes show no page

        return Viewer(lambda caller: self.control.with_caller(caller.name, caller.origin))

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """Store events; all are committed when it returns."""
        await self.client.receive(events)

    async def ping(self) -> None:
        """Make one round trip to the database."""
        async with self._limit.call("asking the database for its time"):
            await self._storage.now()


_IGNORED = frozenset(
    {
        *("max_overflow", "pool_timeout", "pool_recycle", "pool_pre_ping", "use_listen_notify"),
        *("notify_fallback_interval", "max_workflows_per_batch", "leader_heartbeat_interval", "leader_lease_duration"),
    }
)


def _check_options(service_name: Any, settings: Any, hooks: Any) -> None:
    if not isinstance(service_name, str) or "://" in service_name:
        shown_name = show_url(service_name) if isinstance(service_name, str) else service_name
        raise ValueError(
            f"EddaApp({shown_name!r}): expected the name of the service first, and the URL of its database second: "
            'EddaApp("shop", "sqlite:///shop.db")'
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


def _by_name(workflows: Any) -> dict[str, Workflow[Any, Any]]:
    if isinstance(workflows, Workflow):
        raise TypeError(f"EddaApp(workflows={workflows.name}): expected a list of workflows: [{workflows.name}]")
    if isinstance(workflows, str) or not isinstance(workflows, Iterable):
        raise TypeError(f"EddaApp(workflows={repr_short(workflows)}): expected a list of workflows")
    named = {}
    for one in workflows:
        if not isinstance(one, Workflow):
            raise TypeError(
                f"EddaApp(workflows=...): {repr_short(one)} is not a workflow; list the decorated functions themselves"
            )
        named[one.name] = one
    return named


def _resolve_sink(broker_url: str | None, sink: Sink | None, secret: str | Sequence[str] | None) -> Sink | None:
    """Without a receiver the app only stores events: a relayer in another process may send them."""
    if broker_url is None and sink is None:
        logger.warning("outbox_enabled without broker_url or sink: this app stores outbox events but sends none")
        return None
    return resolve_sink(broker_url, sink, secret)


def _web_options(
    options: WebOptions, webhooks: Iterable[Webhook], auth: str | None, tokens: str | Iterable[Token] | None
) -> WebOptions:
    auth = options.auth if auth is None else auth
    known = options.tokens if options.tokens and tokens is None else find_tokens(tokens)
    return replace(
        options,
        webhooks=(*options.webhooks, *webhooks),
        auth=auth,
        tokens=() if auth == "none" and tokens is None else known,
    )


@asynccontextmanager
async def _default_client() -> AsyncIterator[Client]:
    async with EddaApp(worker=False) as app:
        yield app.client


set_default_client(lambda: _default_client() if os.environ.get("EDDA_DB_URL") else None)
