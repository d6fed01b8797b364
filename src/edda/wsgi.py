"""An app for servers that speak WSGI: each process has one thread with an event loop, on which the app lives.

The threads of the server only carry: bytes of a body when the app asks for some, and the answer back. A process that
was forked has none of its parent's threads, so it begins with its own at its first request.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment
from wsgiref.util import is_hop_by_hop

from edda.app import EddaApp
from edda.control.code_graph.definition import read_structures
from edda.engine.tasks import start_task
from edda.errors import AppError
from edda.web import State
from edda.web.asgi import Headers, Message, Scope
from edda.web.responses import Response, response_for_exception, retry_later
from edda.workflow.workflow import registry

logger = logging.getLogger("edda.web")

_CHUNK = 64 * 1024
_LIVENESS = "/_edda/livez"
_DISCONNECT: Message = {"type": "http.disconnect"}
_NOBODY = Response(400)
"""For a client that has gone: the server wants an answer all the same."""
_LOGGED = ("QUERY_STRING", "RAW_URI", "REQUEST_URI")
"""Out of which servers write their logs, after the answer."""

# With atexit alone it would be too late: by then no executor takes work, and closing a database needs one.
_at_exit: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)


def create_wsgi_app(app: EddaApp) -> WSGIApp:
    """`application = create_wsgi_app(app)`, for gunicorn and others. The app must not be started by anybody else."""
    read_structures(registry.get(name) for name in registry.names())  # its loop will run on another thread
    return WSGIApp(app)


class WSGIApp:
    """Starts the app with the first request of a process, and drains it when the process ends."""

    def __init__(self, app: EddaApp) -> None:
        self._app = app
        self._running: _LoopThread | None = None
        self._of_parent: _LoopThread | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)
        _at_exit(self.close)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        exchange = _RequestBridge(environ)
        answer = exchange.carry() if self._find_thread().take(exchange) else self._goodbye()
        _hide_token(environ, exchange.scope)
        start_response(_status_line(answer.status), _text(answer.headers))
        return [answer.body]

    def start(self) -> None:
        """Start the app now and not with the first request; raises what stops it from starting."""
        self._find_thread().start()

    def close(self) -> None:
        """Let requests under way finish and drain the app; a later request would start it again."""
        with self._lock:
            if self._running is not None:
                self._running.close()
            self._running = None

    def _find_thread(self) -> _LoopThread:
        running = self._running
        if running is not None:
            return running
        with self._lock:
            if self._running is None:
                self._running = _LoopThread(self._app)
            return self._running

    def _forget(self) -> None:
        """In a child the parent's thread is not there, and its lock may be held by another that is not there either."""
        self._of_parent, self._running = self._running, None  # kept: to end a loop here would reach into the parent's
        self._lock = threading.Lock()

    def _goodbye(self) -> Response:
        return _whole(retry_later(503, "the app is shutting down", self._app.web_options.retry_after))


class _LoopThread:
    """The thread with the event loop, and the app on it."""

    def __init__(self, app: EddaApp) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._starting: asyncio.Task[None] | None = None
        self._exchanges: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        self._leaving = False
        self._lock = threading.Lock()
        # A daemon: others are waited for before anything is called at exit.
        self._thread = threading.Thread(target=self._run, name="edda-wsgi", daemon=True)
        self._thread.start()

    # On the threads of the server

    def take(self, exchange: _RequestBridge) -> bool:
        """False if it is too late; what is taken is answered."""
        with self._lock:
            if not self._leaving:
                self._loop.call_soon_threadsafe(self._begin, exchange)
            return not self._leaving

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def close(self) -> None:
        with self._lock:
            self._leaving = True
            self._loop.call_soon_threadsafe(self._left.set)  # behind all that was taken
        self._thread.join()

    # On the loop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        await self._left.wait()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        if self._starting is not None:
            await self._drain(self._starting)

    async def _drain(self, starting: asyncio.Task[None]) -> None:
        try:
            await starting
            await self._app.shutdown()
        except Exception:  # nobody waits for this thread but to see it end
            logger.exception("the app did not shut down in order")

    def _begin(self, exchange: _RequestBridge) -> None:
        task = start_task(self._serve(exchange), loop=self._loop)
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)

    async def _serve(self, exchange: _RequestBridge) -> None:
        exchange.arrive()
        try:
            if exchange.path != _LIVENESS:  # which asks whether the process turns, not whether there is a database
                await self._start()
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:  # a client gets an answer whatever happens
            exchange.answer = _whole(response_for_exception(error, self._app.web_options.retry_after))
        finally:
            exchange.leave()

    async def _start(self) -> None:
        """However many come first, it is one start; if it fails, who comes next tries again."""
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
                "loop: leave it to the WSGI application to start it"
            )
        await self._app.initialize()


class _RequestBridge:
    """One request. The server's thread carries what the loop asks for, until the loop has no more questions."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        self.path: str = environ.get("PATH_INFO", "")
        self.scope = _scope(environ)
        self.answer: Response | None = None
        self._body = _Body(environ)
        self._questions: SimpleQueue[asyncio.Future[Message] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop

    # On the thread of the server

    def carry(self) -> Response:
        while (question := self._questions.get()) is not None:
            message = self._body.read()
            with suppress(RuntimeError):  # the loop did not wait for it, and is closed
                self._loop.call_soon_threadsafe(_answer, question, message)
        return self.answer or _NOBODY

    # On the loop

    def arrive(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def receive(self) -> Message:
        question: asyncio.Future[Message] = self._loop.create_future()
        self._questions.put(question)
        return await question

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer = Response(message["status"], b"", tuple(message["headers"]))
        else:
            assert self.answer is not None
            body = self.answer.body + message.get("body", b"")
            self.answer = Response(self.answer.status, body, self.answer.headers)

    def leave(self) -> None:
        self._questions.put(None)


def _answer(question: asyncio.Future[Message], message: Message) -> None:
    if not question.done():  # given up meanwhile: too slow
        question.set_result(message)


class _Body:
    """The body that a server has for us. One that ends before its length was a client that went away."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        declared: str = environ.get("CONTENT_LENGTH", "")
        self._input: Any = environ["wsgi.input"]
        self._left = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        # Where nobody says so, reading to the end would wait for ever.
        self._to_end = not declared and bool(environ.get("wsgi.input_terminated"))

    def read(self) -> Message:
        try:
            return self._read_to_end() if self._to_end else self._read_length()
        except Exception:  # whatever a server raises here: the rest will not come
            return _DISCONNECT

    def _read_to_end(self) -> Message:
        chunk = self._input.read(_CHUNK)
        return _request(chunk, bool(chunk))

    def _read_length(self) -> Message:
        chunk = self._input.read(min(_CHUNK, self._left)) if self._left else b""
        if self._left and not chunk:
            return _DISCONNECT
        self._left -= len(chunk)
        return _request(chunk, self._left > 0)


def _request(chunk: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": chunk, "more_body": more}


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
        # An empty address is a Unix socket; none at all is nobody we know, and not this machine.
        "client": (environ.get("REMOTE_ADDR", "unknown"), 0),
    }


def _headers(environ: WSGIEnvironment) -> Headers:
    named = {key[5:]: value for key, value in environ.items() if key.startswith("HTTP_")}
    for key in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(key):
            named[key] = environ[key]
    return [(_header_name(key), value.encode("latin-1")) for key, value in named.items()]


def _header_name(key: str) -> bytes:
    return key.replace("_", "-").lower().encode("latin-1")


def _utf8(text: str) -> str:
    """WSGI has the bytes of a path as so many characters."""
    return text.encode("latin-1").decode(errors="replace")


def _hide_token(environ: WSGIEnvironment, scope: Scope) -> None:
    before, after = environ.get("QUERY_STRING", ""), scope["query_string"].decode("latin-1")
    if before != after:
        environ.update({key: environ[key].replace(before, after) for key in _LOGGED if key in environ})


def _whole(answer: Response) -> Response:
    return Response(answer.status, answer.body, tuple(answer.all_headers()))


def _status_line(status: int) -> str:
    return f"{status} {HTTPStatus(status).phrase}"


def _text(headers: tuple[tuple[bytes, bytes], ...]) -> list[tuple[str, str]]:
    """What is about the connection is the server's business."""
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    return [(name, value) for name, value in texts if not is_hop_by_hop(name)]
