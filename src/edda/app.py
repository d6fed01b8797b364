"""EddaApp: puts the parts together. The only module that picks a database."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, ParamSpec, Self, TypedDict, TypeVar
from urllib.parse import urlsplit

from edda.core.codec import Codec
from edda.core.model import CancelOutcome, RunFilter, RunId, RunRecord
from edda.core.retry import DEFAULT_RETRY_POLICY, RetryPolicy
from edda.core.states import RunStatus
from edda.engine.clock import Clock, DatabaseClock
from edda.engine.engine import Engine
from edda.engine.hooks import WorkflowHooks
from edda.engine.ids import Ids
from edda.engine.settings import Settings
from edda.errors import AppError, MigrationError, UnknownWorkflowError
from edda.storage.ports import Probe, Storage
from edda.workflow.context import as_datetime, as_microseconds
from edda.workflow.current import add_started, remove_started
from edda.workflow.handle import WorkflowHandle
from edda.workflow.workflow import Starter, StartOptions, Workflow, registry

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT_URL = "sqlite:///edda.db"
_MOST_LOOKED_AT = 10_000
"""Runs one call of find_instances goes through when it filters by input."""


class Instance(TypedDict):
    instance_id: str
    workflow_name: str
    status: str
    input_data: Any
    started_at: datetime
    ended_at: datetime | None
    waiting_for: str | None


class InstancePage(TypedDict):
    instances: list[Instance]
    next_page_token: str | None
    has_more: bool


class EddaApp:
    """One service on one database. `async with app:` runs its worker; leaving it drains.

    Options of earlier frameworks that have no meaning here (`pool_timeout`, `leader_heartbeat_interval`, ...) are
    accepted and ignored.
    """

    def __init__(
        self,
        service_name: str = "edda",
        db_url: str | None = None,
        *,
        hooks: WorkflowHooks | None = None,
        default_retry_policy: RetryPolicy | None = None,
        pool_size: int = 5,
        auto_migrate: bool = True,
        worker: bool = True,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
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
        self.db_url = db_url or os.environ.get("EDDA_DB_URL") or _DEFAULT_URL
        self._auto_migrate = auto_migrate
        self._with_worker = worker
        self._only = None if workflows is None else {w.name: w for w in workflows}
        self._codec = codec or Codec()
        self._settings = settings or _settings_for(self.db_url)
        self._storage = storage or open_storage(self.db_url, pool_size=pool_size, probe=probe, now=_now_of(clock))
        self._clock = clock or DatabaseClock()
        self._ids = ids or Ids()
        self._hooks = hooks
        self._retry_policy = default_retry_policy or DEFAULT_RETRY_POLICY
        self._engine: Engine | None = None
        self._leaving = False

    # Life

    async def initialize(self) -> None:
        """Open the database, bring its schema up to date, start the worker. Does nothing the second time."""
        if self._engine is not None:
            return
        engine = self._make_engine()
        try:
            await self._storage.open()
            await self._prepare_schema()
            await engine.start(self._with_worker)
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
        )

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise AppError(
                f"the app {self.service_name!r} is not started: use `async with app:` or `await app.initialize()`"
            )
        return self._engine

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
        if not 1 <= limit <= 1000:
            raise ValueError(f"find_instances(limit={limit}): from 1 to 1000")
        before = None if page_token is None else _read_token(page_token)
        filter = RunFilter(
            status=None if status is None else RunStatus(status),
            workflow=workflow_name,
            created_from=None if started_after is None else as_microseconds(started_after),
            created_to=None if started_before is None else as_microseconds(started_before),
            before=before,
            limit=limit + 1,
        )
        found, last = await self._find_matching(filter, input_filters or {}, limit)
        instances = [self._describe(record) for record in found]
        return {
            "instances": instances,
            "next_page_token": None if last is None else f"{last[0]}:{last[1]}",
            "has_more": last is not None,
        }

    async def _find_matching(
        self, filter: RunFilter, wanted: Mapping[str, Any], limit: int
    ) -> tuple[list[RunRecord], tuple[int, RunId] | None]:
        """One page, and the key to go on from if there may be more."""
        found: list[RunRecord] = []
        looked_at = 0
        while True:
            records = await self.engine.find_runs(filter)
            for record in records:
                key = (record.created_at, record.run_id)
                if self._fits(record, wanted):
                    if len(found) == limit:
                        return found, (found[-1].created_at, found[-1].run_id)
                    found.append(record)
            looked_at += len(records)
            if len(records) < filter.limit:
                return found, None
            if looked_at >= _MOST_LOOKED_AT:
                return found, key
            filter = RunFilter(
                filter.status, filter.workflow, filter.created_from, filter.created_to, key, filter.limit
            )

    def _fits(self, record: RunRecord, wanted: Mapping[str, Any]) -> bool:
        if not wanted:
            return True
        arguments = self._codec.decode(record.input)
        return all(_same(_at_path(arguments, path), value) for path, value in wanted.items())

    def _describe(self, record: RunRecord) -> Instance:
        return {
            "instance_id": record.run_id,
            "workflow_name": record.workflow,
            "status": record.status.value,
            "input_data": self._codec.decode(record.input),
            "started_at": as_datetime(record.created_at),
            "ended_at": None if record.ended_at is None else as_datetime(record.ended_at),
            "waiting_for": record.reason,
        }


_MISSING = object()


def _at_path(value: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _same(found: Any, wanted: Any) -> bool:
    """Equal by value and kind: True is not 1."""
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)


def _read_token(token: str) -> tuple[int, RunId]:
    created, separator, run_id = token.partition(":")
    if not separator or not created.isdigit():
        raise ValueError(f"page_token {token!r} is not one that find_instances returned")
    return int(created), RunId(run_id)


_IGNORED = frozenset(
    {
        "outbox_enabled",
        "broker_url",
        "message_retention_days",
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


def _now_of(clock: Clock | None) -> Callable[[], int]:
    return clock.now if clock is not None else lambda: time.time_ns() // 1000


def _settings_for(url: str) -> Settings:
    """A file has no server that could restart, and a dead process is known at once by its lock."""
    local = urlsplit(url).scheme.partition("+")[0] in {"sqlite", "memory"}
    return Settings(takeover_grace=0.0, sweep=0.5) if local else Settings()


def open_storage(
    url: str, *, pool_size: int = 5, probe: Probe | None = None, now: Callable[[], int] = lambda: time.time_ns() // 1000
) -> Storage:
    """The adapter for a database URL, plain or with a driver's name in it."""
    scheme = urlsplit(url).scheme
    kind = scheme.partition("+")[0]
    plain = url.replace(scheme, kind, 1)
    if kind == "sqlite":
        from edda.storage.sqlite import SQLiteStorage

        return SQLiteStorage(_sqlite_path(plain), now=now, probe=probe)
    if kind in {"postgresql", "postgres"}:
        from edda.storage.postgres import PostgresStorage

        return PostgresStorage(plain, pool_size=pool_size, probe=probe)
    if kind in {"mysql", "mariadb"}:
        from edda.storage.mysql import MySQLStorage

        return MySQLStorage(plain, pool_size=pool_size, probe=probe)
    if kind == "memory":
        from edda.storage.memory import MemoryStorage

        return MemoryStorage(now=now, probe=probe)
    raise ValueError(
        f"db_url {_without_password(url)!r}: expected sqlite:///file.db, postgresql://..., mysql://... or memory://"
    )


def _sqlite_path(url: str) -> str:
    path = url.removeprefix("sqlite://").partition("?")[0]
    if not path.startswith("/"):
        raise ValueError(
            f"db_url {url!r}: a relative file is sqlite:///name.db, an absolute one sqlite:////dir/name.db"
        )
    return path[1:]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url if parts.password is None else url.replace(f":{parts.password}@", ":***@", 1)
