"""The app that the servers of these tests run: without an engine, it prints what it does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from edda.cloudevents.event import CloudEvent
from edda.web import State, WebApp, WebOptions, find_tokens

from .fakes import FakeService

GATE = Path(os.environ.get("EDDA_TEST_GATE", "/nonexistent"))
"""A named pipe: an event of the type "slow" is stored after a test has written to it."""


class Speaking(FakeService):
    async def initialize(self) -> None:
        if os.environ.get("EDDA_TEST_FAIL"):
            raise RuntimeError("the database is not there")
        await super().initialize()
        print("started", flush=True)

    async def shutdown(self) -> None:
        await super().shutdown()
        print("drained", flush=True)

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        if any(event.type == "slow" for event in events):
            print("storing", flush=True)
            await asyncio.to_thread(GATE.read_bytes)
        await super().receive(events)


app = WebApp(
    Speaking(State.STOPPED),
    WebOptions(auth=os.environ.get("EDDA_TEST_AUTH"), tokens=find_tokens(None), body_timeout=1.5),
)
something_else = object()
