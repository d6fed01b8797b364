"""Everything that can be seen and done, as one interface: in this process, or at a server.

Pages, the JSON API and the command line use nothing else. What goes wrong is an `EddaError`: `InstanceNotFoundError`
for what is not there, `ArgumentError` for what was asked in the wrong way, `ActionRefusedError` for what the run's
state does not allow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from .views import (
    ActionResult,
    AuditView,
    BulkOrder,
    ChannelView,
    DefinitionView,
    EntryView,
    EventDetail,
    EventOrder,
    EventSearch,
    EventView,
    HistorySearch,
    MessageOrder,
    OutboxOrder,
    OutgoingView,
    Page,
    RetryOrder,
    RunDetail,
    RunSearch,
    RunView,
    StartRequest,
    StatsView,
    Timeline,
    WaitView,
    WorkerView,
)


class Controller(Protocol):
    # Runs

    async def list_runs(self, search: RunSearch) -> Page[RunView]: ...

    async def count_runs(self, search: RunSearch) -> dict[str, int]:
        """By status, each up to 10000; those that are not looked for count too, so that filters can show them."""
        ...

    async def get_run(self, run_id: str) -> RunDetail: ...

    async def get_history(self, run_id: str, search: HistorySearch) -> Page[EntryView]: ...

    async def get_timeline(self, run_id: str, generation: int | None = None) -> Timeline: ...

    async def export_run(self, run_id: str) -> dict[str, Any]:
        """All of it in one JSON value: detail, and the history of every generation."""
        ...

    async def start_run(self, order: StartRequest) -> ActionResult: ...

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult: ...

    async def retry_run(self, run_id: str, order: RetryOrder) -> ActionResult: ...

    async def resume_run(self, run_id: str) -> ActionResult: ...

    async def delete_run(self, run_id: str) -> ActionResult: ...

    async def act_on_runs(self, order: BulkOrder) -> ActionResult: ...

    # Events, channels, the outbox

    async def list_events(self, search: EventSearch) -> Page[EventView]: ...

    async def get_event(self, number: int) -> EventDetail: ...

    async def send_event(self, order: EventOrder) -> ActionResult: ...

    async def resend_event(self, number: int) -> ActionResult:
        """The same data and attributes under a new id."""
        ...

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> Page[WaitView]: ...

    async def publish_message(self, order: MessageOrder) -> ActionResult: ...

    async def list_channels(self) -> tuple[ChannelView, ...]: ...

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> Page[OutgoingView]: ...

    async def retry_outbox(self, order: OutboxOrder) -> ActionResult: ...

    async def drop_outbox(self, order: OutboxOrder) -> ActionResult: ...

    # The whole

    async def list_workers(self) -> tuple[WorkerView, ...]: ...

    async def list_definitions(self) -> tuple[DefinitionView, ...]: ...

    async def get_definition(self, workflow: str) -> DefinitionView: ...

    async def get_stats(self) -> StatsView: ...

    async def list_audits(self, cursor: str | None, limit: int) -> Page[AuditView]: ...

    def watch(self) -> AsyncIterator[str]:
        """A mark whenever something has changed, at most one a second; the first at once."""
        ...
