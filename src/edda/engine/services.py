"""What the parts of one engine share: storage, clock, codec, ids, settings, and what the app registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edda.core.codec import Codec
from edda.core.retry import RetryPolicy
from edda.errors import AppError
from edda.storage.ports import Storage
from edda.workflow.workflow import Workflow

from .clock import Clock
from .events import MatchPathCache
from .hooks import HookCaller
from .run.activity_limits import ActivityThreads, ConcurrencyLimiter
from .settings import Settings

if TYPE_CHECKING:
    from edda.storage.sqlalchemy_sessions import Sessions

    from .client import Ids


@dataclass(frozen=True)
class WorkflowLookup:
    """The workflows of the app."""

    find: Callable[[str], Workflow[Any, Any]]
    names: Callable[[], Sequence[str]]
    handlers: Callable[[str], Sequence[Workflow[Any, Any]]] = lambda type: ()
    """The workflows that an event of this type starts."""


def _no_sessions() -> Sessions:
    raise AppError("ctx.session needs a database of its own: memory:// has none")


class LazySessions:
    """The SQLAlchemy sessions of steps. The first step that uses `ctx.session` opens them."""

    def __init__(self, open: Callable[[], Sessions] = _no_sessions) -> None:
        self._open = open
        self._sessions: Sessions | None = None

    def get(self) -> Sessions:
        if self._sessions is None:
            self._sessions = self._open()
        return self._sessions

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            await sessions.close()

    def kill(self) -> None:
        if self._sessions is not None:
            self._sessions.kill()


@dataclass(frozen=True, kw_only=True)
class EngineServices:
    storage: Storage
    clock: Clock
    codec: Codec
    ids: Ids
    settings: Settings
    retry_policy: RetryPolicy
    registry: WorkflowLookup
    service: str
    """The name of the app."""
    database: str = ""
    """The database's URL without a password, for log lines."""
    hooks: HookCaller | None = None
    sessions: LazySessions = field(default_factory=LazySessions)
    match_paths: MatchPathCache = field(init=False)
    threads: ActivityThreads = field(init=False)
    slots: ConcurrencyLimiter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "match_paths", MatchPathCache(self.storage, self.codec))
        object.__setattr__(self, "threads", ActivityThreads(self.settings.threads))
        object.__setattr__(self, "slots", ConcurrencyLimiter())
