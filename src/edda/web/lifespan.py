"""Starting and stopping the app with the server that it runs in."""

from __future__ import annotations

import logging

from edda.errors import EddaError
from edda.web.asgi import Receive, Send
from edda.web.service import Service

logger = logging.getLogger("edda.web")


async def run_lifespan(service: Service, receive: Receive, send: Send) -> None:
    await receive()  # startup is the only thing that can come first
    try:
        await service.initialize()
    except Exception as error:  # the server prints the message and gives up; it never shows whence it came
        # The message of an error that people can do something about says all: a database that does not answer.
        known = isinstance(error, EddaError | OSError)
        logger.log(logging.DEBUG if known else logging.ERROR, "the app did not start", exc_info=True)
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()
    try:
        await service.shutdown()
    except Exception as error:
        logger.exception("the app did not shut down in order")
        await send({"type": "lifespan.shutdown.failed", "message": str(error)})
        return
    await send({"type": "lifespan.shutdown.complete"})
