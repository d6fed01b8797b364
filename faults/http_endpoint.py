"""Endpoints over HTTP that are killed again and again, as senders of events see them."""

from __future__ import annotations

import asyncio
import socket
import time
from types import TracebackType
from typing import Self

import httpx2

from edda.cloudevents import http_binding
from edda.cloudevents.event import CloudEvent

from .worker_fleet import Fleet, Member

PATIENCE = 60.0
COME_AGAIN = frozenset({429, 503})


class Endpoint:
    """One address, and whichever process serves there at the moment."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._port = _free_port()
        self._member: Member | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/events"

    def launch(self) -> None:
        self._member = self._fleet.launch(self._port)

    def kill(self) -> None:
        assert self._member is not None
        self._fleet.kill(self._member)


class Poster:
    """A sender that sends again until it is told that its event is stored."""

    def __init__(self) -> None:
        limits = httpx2.Limits(max_connections=100, max_keepalive_connections=20)
        self._client = httpx2.AsyncClient(trust_env=False, limits=limits, timeout=PATIENCE)
        self.unanswered = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._client.aclose()

    async def post(self, event: CloudEvent, *endpoints: Endpoint) -> None:
        """To one after the other, until one answers 202."""
        headers, body = http_binding.emit(event, http_binding.ContentMode.STRUCTURED)
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            for endpoint in endpoints:
                if await self._is_taken(endpoint, dict(headers), body):
                    return
            await asyncio.sleep(0.01)
        raise TimeoutError(f"event {event.id} was not taken within {PATIENCE} s")

    async def _is_taken(self, endpoint: Endpoint, headers: dict[str, str], body: bytes) -> bool:
        try:
            answer = await self._client.post(endpoint.url, content=body, headers=headers)
        except httpx2.TransportError:
            self.unanswered += 1
            return False
        if answer.status_code not in COME_AGAIN:
            assert answer.status_code == 202, f"{answer.status_code}: {answer.text}"
        return answer.status_code == 202


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
