"""A connect() that is cancelled leaves no connection and no unretrieved error behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from edda.storage.postgres.connection import connect
from tests.conftest import OnPostgres
from tests.storage.other_session import Outsider, become

from .test_server import ALL_GONE

TURNS = 20
"""Turns of the event loop; by then the server has answered."""


async def test_nobody_hears_of_a_connection_that_is_cancelled_at_any_turn_of_the_loop(
    database: OnPostgres, outsider: Outsider
) -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: heard.append(what))
    for turns in range(TURNS):
        connecting = asyncio.create_task(connect(database.url, server_settings={"application_name": "edda"}))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait((connecting,))
        if not connecting.cancelled():  # the server was quicker
            connecting.result().terminate()
    await become(lambda: outsider.fetchval(ALL_GONE))
    gc.collect()
    assert heard == []
