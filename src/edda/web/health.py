"""/_edda/livez and /_edda/readyz."""

from __future__ import annotations

import asyncio
import logging

from edda.engine.tasks import start_task
from edda.errors import EddaError

from .responses import HTTPError, Response, json_response, retry_later
from .service import ServiceGate

logger = logging.getLogger("edda.web")


def liveness() -> Response:
    """Whoever gets this answer has seen the event loop turn."""
    return json_response(200, {"status": "ok"})


class Readiness:
    """Asks the database; however many ask at once, it is one question."""

    def __init__(self, backing: ServiceGate) -> None:
        self._backing = backing
        self._asking: asyncio.Task[Response] | None = None

    async def answer(self) -> Response:
        if self._asking is None:
            self._asking = start_task(self._ask())
            self._asking.add_done_callback(self._forget)
        return await asyncio.shield(self._asking)

    def _forget(self, _: asyncio.Task[Response]) -> None:
        self._asking = None

    async def _ask(self) -> Response:
        try:
            self._backing.check_started()
            await self._backing.ping()
        except HTTPError as refusal:
            return refusal.answer
        except (EddaError, OSError) as error:
            logger.warning("not ready: %s", error)
            return retry_later(503, "the database does not answer", self._backing.retry_after)
        return json_response(200, {"status": "ready"})
