"""The app for WSGI servers: each process runs the app on one thread with an event loop.

The threads of the server read the body when the app asks for more of it, and pass the response back. A forked process
does not have its parent's threads, so it starts its own thread at its first request.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment
from wsgiref.util import is_hop_by_hop

from edda.app import EddaApp
from edda.control.code_graph import read_structures
from edda.engine.tasks import start_task
from edda.errors import AppError
from edda.web import State
from edda.web.responses import Headers, Message, Response, Scope, response_for_exception, retry_later
from edda.workflow.workflow import registry

logger = logging.getLogger("edda.web")

_CHUNK = 64 * 1024
_LIVENESS = "/_edda/livez"
_DISCONNECT: Message = {"type": "http.disconnect"}
_NO_RESPONSE = Response(400)
"""The app sends none to a client that has disconnected, but WSGI requires one."""
_LOGGED = ("QUERY_STRING", "RAW_URI", "REQUEST_URI")
"""Servers write their access log from these, after the response."""

# atexit would be too late: executors accept no work by then, and closing a database needs one.
_at_exit: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)


def create_wsgi_app(app: EddaApp) -> WSGIApp:
    """`application = create_wsgi_app(app)`, for gunicorn and others. Do not start the app yourself."""
    read_structures(registry.get(name) for name in registry.names())  # parsed on the main thread only
    return WSGIApp(app)


class WSGIApp:
    """Starts the app with the first request of a process, and drains it when the process ends."""

    def __init__(self, app: EddaApp) -> None:
        self._app = app
        self._thread: _LoopThread | None = None
        self._parent_thread: _LoopThread | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._reset)
        _at_exit(self.close)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        bridge = _RequestBridge(environ)
        if self._get_thread().submit(bridge):
            response = bridge.run()
        else:
            closing = retry_later(503, "the app is shutting down", self._app.web_options.retry_after)
            response = _with_all_headers(closing)
        _hide_token(environ, bridge.scope)
        status = f"{response.status} {HTTPStatus(response.status).phrase}"
        start_response(status, _text_headers(response.headers))
        return [response.body]

    def start(self) -> None:
        """Start the app before the first request; raises if it does not start."""
        self._get_thread().start()

    def close(self) -> None:
        """Finish the current requests and drain the app; a later request would start it again."""
        with self._lock:
            if self._thread is not None:
                self._thread.close()
            self._thread = None

    def _get_thread(self) -> _LoopThread:
        thread = self._thread
        if thread is not None:
            return thread
        with self._lock:
            if self._thread is None:
                self._thread = _LoopThread(self._app)
            return self._thread

    def _reset(self) -> None:
        """A forked child lacks the thread, and the lock may be held by a thread that the child lacks as well."""
        # The reference is kept: closing the loop in the child would change the parent's epoll set.
        self._parent_thread, self._thread = self._thread, None
        self._lock = threading.Lock()


class _LoopThread:
    """The thread that runs the event loop with the app."""

    def __init__(self, app: EddaApp) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._starting: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._is_closing = False
        self._lock = threading.Lock()
        # A daemon: the interpreter joins other threads before it calls the exit hooks.
        self._thread = threading.Thread(target=self._run, name="edda-wsgi", daemon=True)
        self._thread.start()

    # On the threads of the server

    def submit(self, bridge: _RequestBridge) -> bool:
        """False if the thread is closing; a request that was submitted gets a response."""
        with self._lock:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(self._start_request, bridge)
            return not self._is_closing

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._closed.set)  # after every submitted request
        self._thread.join()

    # On the loop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run_until_closed())

    async def _run_until_closed(self) -> None:
        await self._closed.wait()
        await asyncio.gather(*self._requests, return_exceptions=True)
        if self._starting is not None:
            await self._drain(self._starting)

    async def _drain(self, starting: asyncio.Task[None]) -> None:
        try:
            await starting
            await self._app.shutdown()
        except Exception:  # `close` only joins the thread
            logger.exception("the app did not shut down cleanly")

    def _start_request(self, bridge: _RequestBridge) -> None:
        task = start_task(self._serve(bridge), loop=self._loop)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _serve(self, bridge: _RequestBridge) -> None:
        bridge.loop = self._loop
        try:
            if bridge.path != _LIVENESS:  # liveness must not depend on the database
                await self._start()
            await self._app(bridge.scope, bridge.receive, bridge.send)
        except Exception as error:  # every request gets a response
            bridge.response = _with_all_headers(response_for_exception(error, self._app.web_options.retry_after))
        finally:
            bridge.finish()

    async def _start(self) -> None:
        """Concurrent first requests share one start; after a failed start the next request starts again."""
        starting = self._starting = self._starting or start_task(self._initialize())
        try:
            await asyncio.shield(starting)
        except Exception:
            self._starting = None if self._starting is starting else self._starting
            raise

    async def _initialize(self) -> None:
        if self._app.state is not State.STOPPED:
            raise AppError(
                f"the app {self._app.service_name!r} was started before this process was forked, or on another event "
                "loop: let the WSGI application start it"
            )
        await self._app.initialize()


class _RequestBridge:
    """One request: the server's thread reads the body in pieces for the app, which runs on the loop."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        self.path: str = environ.get("PATH_INFO", "")
        self.scope = _scope(environ)
        self.response: Response | None = None
        self.loop: asyncio.AbstractEventLoop
        self._body = _Body(environ)
        self._reads: SimpleQueue[asyncio.Future[Message] | None] = SimpleQueue()
        """A future for each `receive()` of the app; None at the end of the request."""

    # On the thread of the server

    def run(self) -> Response:
        while (future := self._reads.get()) is not None:
            message = self._body.read()
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(_set_result, future, message)
        return self.response or _NO_RESPONSE

    # On the loop

    async def receive(self) -> Message:
        future: asyncio.Future[Message] = self.loop.create_future()
        self._reads.put(future)
        return await future

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.response = Response(message["status"], b"", tuple(message["headers"]))
        else:
            assert self.response is not None
            self.response = replace(self.response, body=self.response.body + message.get("body", b""))

    def finish(self) -> None:
        self._reads.put(None)


def _set_result(future: asyncio.Future[Message], message: Message) -> None:
    if not future.done():  # cancelled by a time-out
        future.set_result(message)


class _Body:
    """The request body. If it ends before its declared length, the client has disconnected."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        declared: str = environ.get("CONTENT_LENGTH", "")
        self._input: Any = environ["wsgi.input"]
        self._left = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        # Without this flag, reading to the end may block: the server does not mark the end of the body.
        self._to_end = not declared and bool(environ.get("wsgi.input_terminated"))

    def read(self) -> Message:
        size = _CHUNK if self._to_end else min(_CHUNK, self._left)
        try:
            chunk = self._input.read(size) if size else b""
        except Exception:  # servers raise different classes when the client has disconnected
            return _DISCONNECT
        if self._left and not chunk:
            return _DISCONNECT
        self._left -= 0 if self._to_end else len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk) if self._to_end else self._left > 0}


def _scope(environ: WSGIEnvironment) -> Scope:
    root = _utf8(environ.get("SCRIPT_NAME", ""))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": environ.get("SERVER_PROTOCOL", "HTTP/1.1").removeprefix("HTTP/"),
        "method": environ["REQUEST_METHOD"],
        "scheme": environ.get("wsgi.url_scheme", "http"),
        "path": root + _utf8(environ.get("PATH_INFO", "")),
        "root_path": root,
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": _headers(environ),
        # An empty address is a Unix socket. Without an address the client must not count as one on this machine.
        "client": (environ.get("REMOTE_ADDR", "unknown"), 0),
    }


def _headers(environ: WSGIEnvironment) -> Headers:
    values = {key[5:]: value for key, value in environ.items() if key.startswith("HTTP_")}
    for key in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(key):
            values[key] = environ[key]
    return [(key.replace("_", "-").lower().encode("latin-1"), value.encode("latin-1")) for key, value in values.items()]


def _utf8(text: str) -> str:
    """WSGI passes each byte of the path as one latin-1 character."""
    return text.encode("latin-1").decode(errors="replace")


def _hide_token(environ: WSGIEnvironment, scope: Scope) -> None:
    before, after = environ.get("QUERY_STRING", ""), scope["query_string"].decode("latin-1")
    if before != after:
        environ.update({key: environ[key].replace(before, after) for key in _LOGGED if key in environ})


def _with_all_headers(response: Response) -> Response:
    return Response(response.status, response.body, tuple(response.all_headers()))


def _text_headers(headers: tuple[tuple[bytes, bytes], ...]) -> list[tuple[str, str]]:
    """Without hop-by-hop headers, which a WSGI application must not set."""
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    return [(name, value) for name, value in texts if not is_hop_by_hop(name)]
