"""A run seen from outside."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from edda.core.model import CancelOutcome
from edda.core.states import RunStatus
from edda.core.value_path import repr_short
from edda.errors import NotInWorkflowError

from .children import await_run, running_context, with_timeout

if TYPE_CHECKING:
    from edda.core.model import Entry

    from .client import Client

R = TypeVar("R")


def _checked(instance_id: Any) -> str:
    if isinstance(instance_id, str):
        return instance_id
    if inspect.iscoroutine(instance_id):
        instance_id.close()
    raise TypeError(
        f"handle({repr_short(instance_id)}): expected the id of a run, which `await order.start(...)` returns"
    )


class WorkflowHandle(Generic[R]):
    def __init__(self, instance_id: str, client: Client, returns: Any = Any) -> None:
        self.instance_id = _checked(instance_id)
        self._client = client
        self._returns = returns

    def status(self) -> Coroutine[Any, Any, RunStatus]:
        ctx = running_context()
        return self._status() if ctx is None else ctx.step("status", self._status)

    def result(self, timeout: float | None = None) -> Coroutine[Any, Any, R]:
        """The workflow's value, or its own exception raised; `TimeoutError` after `timeout` seconds."""
        ctx = running_context()
        if ctx is None:
            return self._client.await_result(self.instance_id, self._returns, timeout)
        ended = await_run(ctx, self.instance_id, self._returns)
        return ended if timeout is None else with_timeout(ended, timeout, self.instance_id)

    def cancel(self, reason: str = "cancelled") -> Coroutine[Any, Any, bool]:
        """Ask the run to stop; False if it has ended already. The run ends by itself, `finally` blocks included."""
        ctx = running_context()
        return self._cancel(reason) if ctx is None else ctx.step("cancel", self._cancel, reason)

    def retry(self, *, from_start: bool = False) -> Coroutine[Any, Any, None]:
        """Let a run that failed or was cancelled go on: what succeeded is not run again, what failed is tried again.

        `from_start` runs all of it again. `ActionRefusedError` says why a run cannot go on.
        """
        ctx = running_context()
        return self._retry(from_start) if ctx is None else ctx.step("retry", self._retry, from_start)

    def resume(self) -> Coroutine[Any, Any, None]:
        """Have a run replayed now that waits or is parked: it goes on with the code of today, and if it still has to
        wait, it waits for what that code asks for. `ActionRefusedError` if it is running or has ended.
        """
        ctx = running_context()
        return self._resume() if ctx is None else ctx.step("resume", self._resume)

    async def history(self, generation: int | None = None) -> tuple[Entry, ...]:
        """Of the newest generation, or of an earlier one; the first is 0."""
        _refuse_in_workflow("history")
        return await self._client.read_history(self.instance_id, generation)

    async def get(self, key: str, default: Any = None, *, type: Any = Any) -> Any:
        """What the run said last with `ctx.set(key, ...)`."""
        _refuse_in_workflow("get")
        fact = await self._client.get_value(self.instance_id, key)
        return default if fact is None else self._client.codec.decode(fact.value, type)

    async def wait(self, key: str, timeout: float | None = None, *, type: Any = Any) -> Any:
        """As `get`, once there is a value; `ValueNotSetError` if the run ends without one."""
        _refuse_in_workflow("wait")
        fact = await self._client.wait_value(self.instance_id, key, timeout)
        return self._client.codec.decode(fact.value, type)

    async def _status(self) -> RunStatus:
        return (await self._client.read_run(self.instance_id)).status

    async def _cancel(self, reason: str) -> bool:
        return await self._client.request_cancel(self.instance_id, reason) is not CancelOutcome.ENDED

    async def _retry(self, from_start: bool) -> None:
        await self._client.retry_run(self.instance_id, from_start)

    async def _resume(self) -> None:
        await self._client.resume_run(self.instance_id)

    def __repr__(self) -> str:
        return f"<handle of run {self.instance_id}>"


def _refuse_in_workflow(verb: str) -> None:
    if running_context() is not None:
        raise NotInWorkflowError(f"handle.{verb}() in the body of a workflow: read it in an activity.")
