"""Selects the app of a call without one, such as `order.start()`: the app that runs the calling code, else the only
started app of the process."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from edda.errors import AppError

from .context import RunContext
from .loop import WorkflowLoop

if TYPE_CHECKING:
    from datetime import datetime

    from edda.cloudevents.event import CloudEvent
    from edda.core.channels import Message
    from edda.core.codec import Codec
    from edda.core.model import CancelOutcome, Entry, RunRecord, RunValue, Start

    from .context import WorkflowContext
    from .workflow import StartOptions, Workflow


class Client(Protocol):
    """The operations of an app that workflows, handles and activities use; implemented by the engine."""

    def start_workflow(
        self, workflow: Workflow[Any, Any], options: StartOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Coroutine[Any, Any, str]: ...

    async def insert_run(self, start: Start) -> None:
        """Store a run for any worker to claim; `InstanceConflictError` if its id belongs to another run."""
        ...

    def await_result(self, instance_id: str, returns: Any, timeout: float | None) -> Coroutine[Any, Any, Any]: ...

    async def read_run(self, instance_id: str) -> RunRecord: ...

    async def read_history(self, instance_id: str, generation: int | None = None) -> tuple[Entry, ...]: ...

    async def request_cancel(self, instance_id: str, reason: str) -> CancelOutcome: ...

    async def retry_run(self, instance_id: str, from_start: bool) -> None:
        """Raises `ActionRefusedError` if the run's state does not allow it."""
        ...

    async def resume_run(self, instance_id: str) -> None:
        """Raises `ActionRefusedError` if the run is not suspended."""
        ...

    def register_event_schema(self, workflow: str, type: str, model: Any) -> None:
        """Note, for the viewer, that the workflow waits for events of the type with data of the model. A background
        task stores it."""
        ...

    async def send(self, event: CloudEvent, session: Any = None) -> None:
        """Store an event: committed when it returns, or with the session's transaction."""
        ...

    async def publish(self, message: Message, session: Any) -> None:
        """Store a message: committed when it returns, or with the session's transaction."""
        ...

    async def last_event(self) -> int:
        """The highest number in the event log."""
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
"""The app that runs the current activity or workflow code."""

current_context: ContextVar[WorkflowContext | None] = ContextVar("edda_here", default=None)
"""The context of the running workflow or activity code."""

_started: list[Client] = []
_fallback: Callable[[], AbstractAsyncContextManager[Client] | None] = lambda: None  # noqa: E731 - replaced by the app


def register_app(client: Client) -> None:
    _started.append(client)


def unregister_app(client: Client) -> None:
    if client in _started:
        _started.remove(client)


def running_context() -> RunContext | None:
    """The context of the workflow whose code is running; None in activities and outside of Edda."""
    context = current_context.get()
    return context if isinstance(context, RunContext) and isinstance(_get_running_loop(), WorkflowLoop) else None


def get_client() -> Client:
    client = current_app.get()
    if client is not None:
        return client
    if len(_started) == 1:
        return _started[0]
    if not _started:
        raise AppError(
            "no EddaApp is started in this process: use `async with app:` or `await app.initialize()` before starting "
            "or reading workflows (send_event also works without an app if EDDA_DB_URL is set)"
        )
    raise AppError(
        f"{len(_started)} EddaApps are started in this process: select one with app.start(workflow, ...) or "
        "app.handle(id)"
    )


def set_default_client(open_client: Callable[[], AbstractAsyncContextManager[Client] | None]) -> None:
    """Set the function that opens a client for `send_event` while no app is started."""
    global _fallback
    _fallback = open_client


def get_client_or_default() -> AbstractAsyncContextManager[Client]:
    if current_app.get() is None and not _started:
        fallback = _fallback()
        if fallback is not None:
            return fallback
    return nullcontext(get_client())
