"""Calls an ASGI application without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

EVENT = {
    "host": "127.0.0.1:8001",
    "content-type": "application/json",
    "ce-specversion": "1.0",
    "ce-id": "1",
    "ce-source": "/tests",
    "ce-type": "order.created",
}
DISCONNECT: Message = {"type": "http.disconnect"}


@dataclass
class Reply:
    status: int = 0
    """0: there was no response."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    receives: int = 0

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


@dataclass
class Call:
    """`messages` are returned by `receive()`, then a disconnect forever, as servers do."""

    method: str = "POST"
    path: str = "/events"
    headers: Iterable[tuple[str, str]] | dict[str, str] = field(default_factory=lambda: EVENT)
    body: bytes = b"{}"
    messages: list[Message] | None = None
    query: bytes = b""
    root_path: str = ""
    client: tuple[str, int] | None = ("127.0.0.1", 50000)
    scope_type: str = "http"

    def scope(self) -> Message:
        pairs = self.headers.items() if isinstance(self.headers, dict) else self.headers
        return {
            "type": self.scope_type,
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": self.root_path,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs],
            "client": self.client,
            "server": ("127.0.0.1", 8001),
        }


async def ask(application: Application, call: Call | None = None, **changes: Any) -> Reply:
    return await deliver(application, call or Call(**changes))


async def deliver(application: Application, call: Call, scope: Message | None = None) -> Reply:
    messages = [{"type": "http.request", "body": call.body}] if call.messages is None else list(call.messages)
    reply = Reply()

    async def receive() -> Message:
        reply.receives += 1
        return messages.pop(0) if messages else DISCONNECT

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert reply.status == 0, "two answers"
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            assert len(reply.headers) == len(message["headers"]), "a header came twice"
        else:
            reply.body += message.get("body", b"")

    async with asyncio.timeout(20):
        await application(scope or call.scope(), receive, send)
    return reply


def chunk(body: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}
