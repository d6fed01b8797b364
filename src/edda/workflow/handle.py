"""A run seen from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from edda.core.model import CancelOutcome
from edda.core.states import RunStatus

if TYPE_CHECKING:
    from edda.core.model import Entry

    from .current import Client

R = TypeVar("R")


class WorkflowHandle(Generic[R]):
    def __init__(self, instance_id: str, client: Client, returns: Any = Any) -> None:
        self.instance_id = instance_id
        self._client = client
        self._returns = returns

    async def status(self) -> RunStatus:
        return (await self._client.read_run(self.instance_id)).status

    async def result(self, timeout: float | None = None) -> R:
        """The workflow's value, or its own exception raised; `TimeoutError` after `timeout` seconds."""
        value: R = await self._client.await_result(self.instance_id, self._returns, timeout)
        return value

    async def cancel(self, reason: str = "cancelled") -> bool:
        """Ask the run to stop; False if it has ended already. The run ends by itself, `finally` blocks included."""
        return await self._client.request_cancel(self.instance_id, reason) is not CancelOutcome.ENDED

    async def history(self) -> tuple[Entry, ...]:
        return await self._client.read_history(self.instance_id)

    def __repr__(self) -> str:
        return f"<handle of run {self.instance_id}>"
