"""The ASGI application: routing, and the lifespan that starts and stops the app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edda.errors import EddaError
from edda.web.asgi import Message, Receive, Scope, Send
from edda.web.events import EventEndpoint
from edda.web.metrics import Metrics
from edda.web.options import WebOptions
from edda.web.request import Request, read_request
from edda.web.security.access import AccessPolicy
from edda.web.service import Service, State

from .cancel import CancelEndpoint
from .internal import Control, InternalRoutes, Viewer
from .request import BodyReader, DisconnectedError
from .responses import HTTPError, http_error, response_for_exception
from .service import ServiceGate
from .sse import ASGIResponse, EventStreams
from .webhook_endpoint import WebhookEndpoint

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


class WebApp:
    """POST to any path takes events, but for `/cancel/...`, what is below `/_edda`, and the paths of webhooks."""

    def __init__(
        self,
        service: Service,
        options: WebOptions | None = None,
        *,
        control: Control | None = None,
        pages: Viewer | None = None,
    ) -> None:
        self.options = options or WebOptions()
        self._service = service
        door = AccessPolicy(self.options)
        backing, intake = ServiceGate(service, self.options), BodyReader(self.options)
        self._events = EventEndpoint(self.options, door, intake, backing)
        self._signed = WebhookEndpoint(self.options, intake, backing)
        self._cancelling = CancelEndpoint(door, intake, backing)
        self._streams = EventStreams(lambda: service.state is State.STARTED)
        self._metrics = Metrics()
        self._inside = InternalRoutes(self.options, door, intake, backing, self._streams, self._metrics, control, pages)

    def end_streams(self) -> None:
        """Servers wait for those that are connected before they stop the app: whoever stops one calls this first."""
        self._streams.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await run_lifespan(self._service, receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})
            case other:
                raise ValueError(f"this ASGI application serves http and lifespan, not {other!r}")

    @asynccontextmanager
    async def lifespan(self, host: object = None) -> AsyncIterator[None]:
        """For the application that this one is mounted in: `FastAPI(lifespan=app.lifespan)`."""
        await self._service.initialize()
        try:
            yield
        finally:
            await self._service.shutdown()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = read_request(scope, receive)
        try:
            answer: ASGIResponse = await self._answer(request)
        except DisconnectedError:
            return
        except HTTPError as refusal:
            answer = self._inside.error_page(request, refusal.answer)
        except Exception as error:  # a client gets an answer whatever happens, and never a traceback
            answer = self._inside.error_page(request, response_for_exception(error, self.options.retry_after))
        self._metrics.count(answer.status)
        try:
            await answer.send(
                self._limited(send), private=request.query_token is not None, head=request.method == "HEAD"
            )
        except TimeoutError:  # an OSError too, hence the first
            logger.debug("the client does not read its answer (write_timeout); the connection is given up")
        except OSError:  # newer servers say so when the client has gone
            logger.debug("the client had gone before its answer")

    def _limited(self, send: Send) -> Send:
        """A server's `send` waits for as long as the client does not read."""
        seconds = self.options.write_timeout

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await send(message)
            except RuntimeError as error:  # of uvloop, which has no class of its own for it
                if not str(error).endswith("the handler is closed"):
                    raise
                raise BrokenPipeError("the connection is closed") from error

        return send_in_time

    async def _answer(self, request: Request) -> ASGIResponse:
        self._check_headers(request)
        path = request.path
        if path == "/_edda" or path.startswith("/_edda/"):
            return await self._inside.answer(request)
        if path == "/cancel" or path.startswith("/cancel/"):
            return await self._cancelling.answer(request)
        if self._signed.matches(request):
            return await self._signed.answer(request)
        return await self._events.answer(request)

    def _check_headers(self, request: Request) -> None:
        count, limit = len(request.headers), self.options.max_header_count
        if request.has(b"content-length") and request.has(b"transfer-encoding"):
            # Two proxies that believe different ones see different requests. Some servers let it pass to us.
            error = "Content-Length and Transfer-Encoding exclude each other; send one of them"
            raise http_error(400, error, headers={"Connection": "close"})
        if request.has(b"transfer-encoding") and request.header(b"transfer-encoding") != b"chunked":
            raise http_error(400, "of Transfer-Encoding only chunked is taken", headers={"Connection": "close"})
        size = sum(len(name) + len(value) for name, value in request.headers)
        if count > limit or size > self.options.max_header_bytes:
            error = f"more than {limit} headers or {self.options.max_header_bytes} bytes of them"
            raise http_error(431, error, headers={"Connection": "close"})
