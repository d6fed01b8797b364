"""RemoteController: a server's control API as if it were here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from edda import errors
from edda.core.urls import show_url, split_credentials
from edda.errors import AppError, EddaError

from . import operations
from .operations import PREFIX, AuditQuery, Operation, OutboxQuery, TimelineQuery, WaitQuery
from .views import (
    ActionResult,
    AuditView,
    BulkOrder,
    CancelOrder,
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

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport, AsyncClient, Response

_PATIENCE = 30.0
_PAUSE = 1.0
"""Seconds until a stream that has ended is asked for again."""
_BY_STATUS: dict[int, type[EddaError]] = {
    404: errors.NotFoundError,
    409: errors.ActionRefusedError,
    422: errors.ArgumentError,
}

T = TypeVar("T")


class RemoteController:
    """`url` is where the app is served, without `/_edda`. Errors come back as what they were over there."""

    def __init__(self, url: str, token: str | None = None, *, transport: AsyncBaseTransport | None = None) -> None:
        self._url, self._credentials = split_credentials(url.rstrip("/"))
        self._shown = show_url(self._url)
        self._token = token
        self._transport = transport
        self._kept: AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        client, self._kept = self._kept, None
        if client is not None:
            await client.aclose()

    # Runs

    async def list_runs(self, search: RunSearch) -> Page[RunView]:
        return await self._call(operations.LIST_RUNS, query=search)

    async def count_runs(self, search: RunSearch) -> dict[str, int]:
        return await self._call(operations.COUNT_RUNS, query=search)

    async def get_run(self, run_id: str) -> RunDetail:
        return await self._call(operations.GET_RUN, run_id)

    async def get_history(self, run_id: str, search: HistorySearch) -> Page[EntryView]:
        return await self._call(operations.GET_HISTORY, run_id, query=search)

    async def get_timeline(self, run_id: str, generation: int | None = None) -> Timeline:
        return await self._call(operations.GET_TIMELINE, run_id, query=TimelineQuery(generation))

    async def export_run(self, run_id: str) -> dict[str, Any]:
        return await self._call(operations.EXPORT_RUN, run_id)

    async def start_run(self, order: StartRequest) -> ActionResult:
        return await self._call(operations.START_RUN, body=order)

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult:
        return await self._call(operations.CANCEL_RUN, run_id, body=CancelOrder(reason))

    async def retry_run(self, run_id: str, order: RetryOrder) -> ActionResult:
        return await self._call(operations.RETRY_RUN, run_id, body=order)

    async def resume_run(self, run_id: str) -> ActionResult:
        return await self._call(operations.RESUME_RUN, run_id)

    async def delete_run(self, run_id: str) -> ActionResult:
        return await self._call(operations.DELETE_RUN, run_id)

    async def act_on_runs(self, order: BulkOrder) -> ActionResult:
        return await self._call(operations.ACT_ON_RUNS, body=order)

    # Events, channels, the outbox

    async def list_events(self, search: EventSearch) -> Page[EventView]:
        return await self._call(operations.LIST_EVENTS, query=search)

    async def get_event(self, number: int) -> EventDetail:
        return await self._call(operations.GET_EVENT, number)

    async def send_event(self, order: EventOrder) -> ActionResult:
        return await self._call(operations.SEND_EVENT, body=order)

    async def resend_event(self, number: int) -> ActionResult:
        return await self._call(operations.RESEND_EVENT, number)

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> Page[WaitView]:
        return await self._call(operations.LIST_WAITS, query=WaitQuery(type, cursor, limit))

    async def list_channels(self) -> tuple[ChannelView, ...]:
        return await self._call(operations.LIST_CHANNELS)

    async def publish_message(self, order: MessageOrder) -> ActionResult:
        return await self._call(operations.PUBLISH_MESSAGE, body=order)

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> Page[OutgoingView]:
        return await self._call(operations.LIST_OUTBOX, query=OutboxQuery(state, cursor, limit))

    async def retry_outbox(self, order: OutboxOrder) -> ActionResult:
        return await self._call(operations.RETRY_OUTBOX, body=order)

    async def drop_outbox(self, order: OutboxOrder) -> ActionResult:
        return await self._call(operations.DROP_OUTBOX, body=order)

    # The whole

    async def list_workers(self) -> tuple[WorkerView, ...]:
        return await self._call(operations.LIST_WORKERS)

    async def list_definitions(self) -> tuple[DefinitionView, ...]:
        return await self._call(operations.LIST_DEFINITIONS)

    async def get_definition(self, workflow: str) -> DefinitionView:
        return await self._call(operations.GET_DEFINITION, workflow)

    async def get_stats(self) -> StatsView:
        return await self._call(operations.GET_STATS)

    async def list_audits(self, cursor: str | None, limit: int) -> Page[AuditView]:
        return await self._call(operations.LIST_AUDITS, query=AuditQuery(cursor, limit))

    async def watch(self) -> AsyncGenerator[str, None]:
        """Servers end a stream now and then: the next one begins where it ended."""
        seen: str | None = None
        while True:
            async for mark in self._read_stream():
                if mark != seen:
                    yield mark
                seen = mark
            await asyncio.sleep(_PAUSE)

    # The way there

    async def _read_stream(self) -> AsyncIterator[str]:
        import httpx2

        try:
            async with self._client().stream("GET", f"{PREFIX}/stream") as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _error_in(response)
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        yield line.removeprefix("data: ")
        except httpx2.HTTPError as error:
            raise self._away(error) from error

    async def _call(
        self, operation: Operation[T], *values: str | int, query: Struct | None = None, body: Struct | None = None
    ) -> T:
        import httpx2

        try:
            response = await self._client().request(
                operation.method,
                PREFIX + operation.address(*values),
                params=None if query is None else urlencode(_pairs(query)),
                content=None if body is None else msgspec.json.encode(body),
                headers=None if body is None else {"content-type": "application/json"},
                timeout=operation.seconds or _PATIENCE,
            )
        except httpx2.HTTPError as error:
            raise self._away(error) from error
        if response.status_code != 200:
            raise _error_in(response)
        try:
            return msgspec.json.decode(response.content, type=operation.answer)
        except msgspec.DecodeError as error:
            raise AppError(f"{self._shown} answers what is no answer of the control API: {error}") from error

    def _client(self) -> AsyncClient:
        import httpx2  # only who asks a server pays for it

        if self._kept is None:
            headers = self._credentials if self._token is None else {"authorization": f"Bearer {self._token}"}
            self._kept = httpx2.AsyncClient(
                base_url=self._url,
                headers=headers,
                timeout=_PATIENCE,
                transport=self._transport,
                trust_env=False,  # a token goes to the server that was named, not to a proxy
            )
        return self._kept

    def _away(self, error: Exception) -> AppError:
        return AppError(f"{self._shown} does not answer: {error or type(error).__name__}; is it served there?")


def _pairs(query: Struct) -> list[tuple[str, str]]:
    """Without what is not given; what is a list comes once for each of its values."""
    given: list[tuple[str, str]] = []
    for name, value in msgspec.to_builtins(query).items():
        values = value if isinstance(value, list | tuple) else [value]
        given += [(name, _text(one)) for one in values if one is not None]
    return given


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Problem(Struct):
    error: str
    error_type: str


def _error_in(response: Response) -> EddaError:
    try:
        problem = msgspec.json.decode(response.content, type=_Problem)
    except msgspec.DecodeError:
        return AppError(f"{response.url.host} answers {response.status_code}, and not as the control API does")
    kind = getattr(errors, problem.error_type, None)
    if not (isinstance(kind, type) and issubclass(kind, EddaError)):
        kind = _BY_STATUS.get(response.status_code, AppError)
    return kind(problem.error)
