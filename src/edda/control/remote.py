"""`RemoteController`: the control interface on the JSON API of a server."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from edda import errors
from edda.core.redact import show_url, split_credentials
from edda.errors import AppError, EddaError

from . import views
from .controller import OPERATIONS, PREFIX, Controller, Operation

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport, AsyncClient, Response

_TIMEOUT = 30.0
_RECONNECT_DELAY = 1.0
"""Seconds until `watch` opens the next stream."""
_BY_STATUS: dict[int, type[EddaError]] = {
    404: errors.NotFoundError,
    409: errors.ActionRefusedError,
    422: errors.ArgumentError,
}

T = TypeVar("T")
P = ParamSpec("P")


def _call(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[RemoteController, P], Coroutine[Any, Any, T]]:
    """The method of `RemoteController` that sends the operation."""
    operation: Operation[T] = next(one for one in OPERATIONS if one.name == method.__name__)
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def call(self: RemoteController, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        return await self.request(operation, given.args[1:])

    return call


class RemoteController:
    """`url` is the address of the served app, without `/_edda`. An error response is raised as the `EddaError` that it
    names."""

    def __init__(self, url: str, token: str | None = None, *, transport: AsyncBaseTransport | None = None) -> None:
        self._url, self._credentials = split_credentials(url.rstrip("/"))
        self._shown = show_url(self._url)
        self._token = token
        self._transport = transport
        self._http: AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        client, self._http = self._http, None
        if client is not None:
            await client.aclose()

    list_runs = _call(Controller.list_runs)
    count_runs = _call(Controller.count_runs)
    get_run = _call(Controller.get_run)
    get_history = _call(Controller.get_history)
    get_timeline = _call(Controller.get_timeline)
    export_run = _call(Controller.export_run)
    start_run = _call(Controller.start_run)
    cancel_run = _call(Controller.cancel_run)
    retry_run = _call(Controller.retry_run)
    resume_run = _call(Controller.resume_run)
    delete_run = _call(Controller.delete_run)
    act_on_runs = _call(Controller.act_on_runs)
    list_events = _call(Controller.list_events)
    get_event = _call(Controller.get_event)
    send_event = _call(Controller.send_event)
    resend_event = _call(Controller.resend_event)
    list_waits = _call(Controller.list_waits)
    list_channels = _call(Controller.list_channels)
    publish_message = _call(Controller.publish_message)
    list_outbox = _call(Controller.list_outbox)
    retry_outbox = _call(Controller.retry_outbox)
    drop_outbox = _call(Controller.drop_outbox)
    list_workers = _call(Controller.list_workers)
    list_definitions = _call(Controller.list_definitions)
    get_definition = _call(Controller.get_definition)
    get_stats = _call(Controller.get_stats)
    list_audits = _call(Controller.list_audits)

    async def get_run_and_timeline(
        self, run_id: str, generation: int | None = None
    ) -> tuple[views.RunDetail, views.Timeline]:
        return await self.get_run(run_id), await self.get_timeline(run_id, generation)

    async def watch(self) -> AsyncGenerator[str, None]:
        """Opens the next stream when the server ends one, as it does every minute."""
        seen: str | None = None
        while True:
            async for token in self._read_stream():
                if token != seen:
                    yield token
                seen = token
            await asyncio.sleep(_RECONNECT_DELAY)

    # HTTP

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
            raise self._unreachable(error) from error

    async def request(self, operation: Operation[T], arguments: Sequence[Any]) -> T:
        import httpx2

        count = operation.path.count("{")
        kind, rest = operation.query or operation.body, arguments[count:]
        record = None if kind is None else kind(*rest) if operation.unpack_fields else rest[0]
        try:
            response = await self._client().request(
                operation.method,
                PREFIX + operation.address(*arguments[:count]),
                params=None if operation.query is None else urlencode(_pairs(record)),
                content=None if operation.body is None else msgspec.json.encode(record),
                headers=None if operation.body is None else {"content-type": "application/json"},
                timeout=operation.seconds or _TIMEOUT,
            )
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _error_in(response)
        try:
            return msgspec.json.decode(response.content, type=operation.response)
        except msgspec.DecodeError as error:
            raise AppError(
                f"{self._shown} returned no response of the control API ({error}): is it the same version?"
            ) from error

    def _client(self) -> AsyncClient:
        import httpx2  # here, because it takes longer to import than the other commands take to run

        if self._http is None:
            headers = self._credentials if self._token is None else {"authorization": f"Bearer {self._token}"}
            self._http = httpx2.AsyncClient(
                base_url=self._url,
                headers=headers,
                timeout=_TIMEOUT,
                transport=self._transport,
                trust_env=False,  # sends the token to no proxy of the environment
            )
        return self._http

    def _unreachable(self, error: Exception) -> AppError:
        return AppError(
            f"{self._shown} does not answer ({error or type(error).__name__}): check the URL, and that the app runs"
        )


def _pairs(query: Any) -> list[tuple[str, str]]:
    """Query parameters: one for each value of a list, none for None."""
    given: list[tuple[str, str]] = []
    for name, value in msgspec.to_builtins(query).items():
        values = value if isinstance(value, list | tuple) else [value]
        given += [(name, str(one).lower() if isinstance(one, bool) else str(one)) for one in values if one is not None]
    return given


class _Problem(Struct):
    error: str
    error_type: str


def _error_in(response: Response) -> EddaError:
    try:
        problem = msgspec.json.decode(response.content, type=_Problem)
    except msgspec.DecodeError:
        return AppError(
            f"{response.url.host} returned {response.status_code}, but no error of the control API: check the URL"
        )
    kind = getattr(errors, problem.error_type, None)
    if not (isinstance(kind, type) and issubclass(kind, EddaError)):
        kind = _BY_STATUS.get(response.status_code, AppError)
    return kind(problem.error)
