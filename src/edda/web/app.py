"""The ASGI application: lifespan, routing, and one response to every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from edda.errors import EddaError
from edda.web.access import AccessPolicy
from edda.web.api import Control
from edda.web.endpoints import Endpoints
from edda.web.metrics import Metrics
from edda.web.options import WebOptions
from edda.web.request import BodyReader, DisconnectedError, Request, read_request
from edda.web.service import Service, ServiceGate, State

from .internal import InternalRoutes, PageViewer
from .responses import HTTPError, Message, Receive, Scope, Send, http_error, response_for_exception
from .sse import ASGIResponse, EventStreams

logger = logging.getLogger("edda.web")


class WebApp:
    """POST stores events at every path except `/cancel/...`, those below `/_edda`, and those of webhooks."""

    def __init__(
        self,
        service: Service,
        options: WebOptions | None = None,
        *,
        control: Control | None = None,
        viewer: Callable[[], PageViewer] | None = None,
    ) -> None:
        self.options = options or WebOptions()
        self._service = service
        access = AccessPolicy(self.options)
        gate, bodies = ServiceGate(service, self.options), BodyReader(self.options)
        self._endpoints = Endpoints(self.options, access, bodies, gate)
        self._streams = EventStreams(lambda: service.state is State.STARTED)
        self._metrics = Metrics()
        self._internal = InternalRoutes(
            self.options, access, bodies, gate, self._streams, self._metrics, control, viewer
        )

    def end_streams(self) -> None:
        """To be called before a server is stopped: it waits for open connections before it stops the app."""
        self._streams.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await _run_lifespan(self._service, receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})
            case other:
                raise ValueError(f"this ASGI application supports http and lifespan, not {other!r}")

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
            self._check_headers(request)
            is_internal = request.path == "/_edda" or request.path.startswith("/_edda/")
            handler = self._internal if is_internal else self._endpoints
            response: ASGIResponse = await handler.handle(request)
        except DisconnectedError:
            return
        except HTTPError as error:
            response = self._internal.error_page(request, error.response)
        except Exception as error:  # every request gets a response, and never a traceback
            response = self._internal.error_page(request, response_for_exception(error, self.options.retry_after))
        self._metrics.responses[response.status] += 1
        try:
            await response.send(
                self._with_timeout(send), private=request.query_token is not None, head=request.method == "HEAD"
            )
        except TimeoutError:  # a subclass of OSError, hence the first
            logger.debug("the client does not read its response (write_timeout), closing the connection")
        except OSError:  # raised by servers that report a closed connection
            logger.debug("the client disconnected before its response was sent")

    def _with_timeout(self, send: Send) -> Send:
        """A server's `send` waits until the client has read enough, without a limit of its own."""
        seconds = self.options.write_timeout

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await send(message)
            except RuntimeError as error:  # uvloop has no exception class of its own for a closed transport
                if not str(error).endswith("the handler is closed"):
                    raise
                raise BrokenPipeError("the connection is closed") from error

        return send_in_time

    def _check_headers(self, request: Request) -> None:
        count, limit = len(request.headers), self.options.max_header_count
        if request.has(b"content-length") and request.has(b"transfer-encoding"):
            # Proxies that trust different ones of the two see different requests. Some servers do not reject it.
            error = "Content-Length and Transfer-Encoding exclude each other; send one of them"
            raise http_error(400, error, headers={"Connection": "close"})
        if request.has(b"transfer-encoding") and request.header(b"transfer-encoding") != b"chunked":
            raise http_error(400, "expected no Transfer-Encoding other than chunked", headers={"Connection": "close"})
        size = sum(len(name) + len(value) for name, value in request.headers)
        if count > limit or size > self.options.max_header_bytes:
            error = f"more than {limit} headers, or more than {self.options.max_header_bytes} bytes of headers"
            raise http_error(431, error, headers={"Connection": "close"})


async def _run_lifespan(service: Service, receive: Receive, send: Send) -> None:
    await receive()  # lifespan.startup
    try:
        await service.initialize()
    except Exception as error:
        # The server logs the message without a traceback. That suffices for an error with a known cause, such as a
        # database that does not respond.
        is_known = isinstance(error, EddaError | OSError)
        logger.log(logging.DEBUG if is_known else logging.ERROR, "the app did not start", exc_info=True)
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()  # lifespan.shutdown
    try:
        await service.shutdown()
    except Exception as error:
        logger.exception("the app did not shut down cleanly")
        await send({"type": "lifespan.shutdown.failed", "message": str(error)})
        return
    await send({"type": "lifespan.shutdown.complete"})
