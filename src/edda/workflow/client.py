"""Which app a plain `order.start()` means: the one whose code is running, else the only one that is started."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from edda.errors import AppError

if TYPE_CHECKING:
    from datetime import datetime

    from edda.cloudevents.event import CloudEvent
    from edda.core.channels import Message
    from edda.core.codec import Codec
    from edda.core.model import CancelOutcome, Entry, RunRecord, RunValue, Start

    from .context import WorkflowContext
    from .workflow import StartOptions, Workflow


class Client(Protocol):
    """What workflows and handles ask of an app."""

    def start_workflow(
        self, workflow: Workflow[Any, Any], options: StartOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Coroutine[Any, Any, str]: ...

    async def insert_run(self, start: Start) -> None:
        """For anybody to claim; `InstanceConflictError` if its id belongs to another run."""
        ...

    def await_result(self, instance_id: str, returns: Any, timeout: float | None) -> Coroutine[Any, Any, Any]: ...

    async def read_run(self, instance_id: str) -> RunRecord: ...

    async def read_history(self, instance_id: str, generation: int | None = None) -> tuple[Entry, ...]: ...

    async def request_cancel(self, instance_id: str, reason: str) -> CancelOutcome: ...

    async def retry_run(self, instance_id: str, from_start: bool) -> None:
        """`ActionRefusedError` if the run's state does not allow it."""
        ...

    async def resume_run(self, instance_id: str) -> None:
        """`ActionRefusedError` if the run is not suspended."""
        ...

    def register_event_schema(self, workflow: str, type: str, model: Any) -> None:
        """A run of the workflow waits for events of the type whose data fits the model. Returns at once."""
        ...

    async def send(self, event: CloudEvent, session: Any = None) -> None:
        """Stored when it returns, or with the session's own commit."""
        ...

    async def publish(self, message: Message, session: Any) -> None:
        """Stored when it returns, or with the session's own commit."""
        ...

    async def last_event(self) -> int:
        """The newest number of the log."""
        ...

    async def get_value(self, instance_id: str, name: str) -> RunValue | None: ...

    async def wait_value(self, instance_id: str, name: str, timeout: float | None) -> RunValue: ...

    @property
    def microseconds(self) -> int: ...

    @property
    def codec(self) -> Codec: ...

    def new_id(self) -> str: ...

    def now(self) -> datetime: ...


current_app: ContextVar[Client | None] = ContextVar("edda_running_app", default=None)
"""Set around activity bodies and workflow code."""

current_context: ContextVar[WorkflowContext | None] = ContextVar("edda_here", default=None)
"""The context of the workflow or activity whose code is running."""

_started: list[Client] = []
_fallback: Callable[[], AbstractAsyncContextManager[Client] | None] = lambda: None  # noqa: E731 - replaced by the app


def register_app(client: Client) -> None:
    _started.append(client)


def unregister_app(client: Client) -> None:
    if client in _started:
        _started.remove(client)


def get_client() -> Client:
    client = current_app.get()
    if client is not None:
        return client
    if len(_started) == 1:
        return _started[0]
    if not _started:
        raise AppError(
            "no EddaApp is started in this process: use `async with app:` or `await app.initialize()` before starting "
            "or reading workflows (events are also sent to the database in EDDA_DB_URL, if it is set)"
        )
    raise AppError(
        f"{len(_started)} EddaApps are started in this process, so the call must say which one it means: "
        "app.start(workflow, ...) or app.handle(id)"
    )


def set_default_client(open_client: Callable[[], AbstractAsyncContextManager[Client] | None]) -> None:
    """Where events go while no app is started."""
    global _fallback
    _fallback = open_client


def get_client_or_default() -> AbstractAsyncContextManager[Client]:
    if current_app.get() is None and not _started:
        fallback = _fallback()
        if fallback is not None:
            return fallback
    return nullcontext(get_client())
