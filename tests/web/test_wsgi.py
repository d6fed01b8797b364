"""The app behind WSGI servers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import WSGIApplication
from wsgiref.validate import validator

import httpx2
import pytest

from edda import EddaApp, ReceivedEvent, WorkflowContext, activity, sleep, workflow
from edda.errors import StorageUnavailableError
from edda.web import State, WebOptions
from edda.wsgi import WSGIApp, create_wsgi_app
from tests.conftest import Database, InFile, MakeDatabase, OnServer

from .calls import EVENT
from .servers import ROOT, TIMEOUT, Server, free_port, running

HEADERS = {name: value for name, value in EVENT.items() if name != "host"}
SECRET = "Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe"


@dataclass
class Got:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(application: WSGIApplication, body: Any = b"{}", **changes: Any) -> Got:
    """One WSGI request; a change to None removes a key."""
    environ: dict[str, Any] = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/events",
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "8001",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "CONTENT_TYPE": "application/json",
        **{f"HTTP_{name.upper().replace('-', '_')}": EVENT[name] for name in EVENT if name != "content-type"},
    }
    return hand_over(application, {key: value for key, value in (environ | changes).items() if value is not None})


def hand_over(application: WSGIApplication, environ: dict[str, Any]) -> Got:
    got = Got()

    def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> Callable[[bytes], object]:
        got.status, got.headers = int(status.split(maxsplit=1)[0]), {name.lower(): value for name, value in headers}
        return lambda data: None

    answer = application(environ, start_response)
    got.body = b"".join(answer)
    if hasattr(answer, "close"):
        answer.close()
    return got


class Recorded(EddaApp):
    """Fails the given number of times, and records the thread that started it."""

    def __init__(self, failures: int = 0, **options: Any) -> None:
        super().__init__("shop", "memory://", worker=False, **options)
        self.failures = failures
        self.threads: list[str] = []

    async def initialize(self, *, worker: bool | None = None) -> None:
        self.threads.append(threading.current_thread().name)
        await asyncio.sleep(0.05)  # so that other requests arrive meanwhile
        if self.failures:
            self.failures -= 1
            raise StorageUnavailableError("the database is not there yet")
        await super().initialize(worker=worker)


@pytest.fixture
def app() -> Recorded:
    return Recorded()


@pytest.fixture
def application(app: Recorded) -> Iterator[WSGIApp]:
    application = create_wsgi_app(app)
    yield application
    application.close()


@contextmanager
def wrapped(app: EddaApp) -> Iterator[WSGIApp]:
    application = create_wsgi_app(app)
    try:
        yield application
    finally:
        application.close()


# Start and end


def test_the_first_request_starts_the_app_on_a_thread_of_its_own(app: Recorded, application: WSGIApp) -> None:
    assert app.state is State.STOPPED
    got = call(application)
    assert (got.status, got.json) == (202, {"status": "accepted"})
    assert app.threads == ["edda-wsgi"]


def test_many_first_requests_start_it_once_and_are_all_served(app: Recorded, application: WSGIApp) -> None:
    with ThreadPoolExecutor(20) as threads:
        calls = [threads.submit(call, application, HTTP_CE_ID=str(number)) for number in range(100)]
        assert {one.result(TIMEOUT).status for one in calls} == {202}
    assert len(app.threads) == 1


def test_it_can_be_started_before_the_first_request(app: Recorded, application: WSGIApp) -> None:
    application.start()
    assert app.state is State.STARTED
    assert call(application).status == 202
    assert len(app.threads) == 1


def test_an_app_that_does_not_start_says_so_and_is_started_by_the_next_request() -> None:
    app = Recorded(failures=2)
    with wrapped(app) as application:
        got = call(application)
        assert (got.status, got.json["error_type"], got.json["retryable"]) == (503, "StorageUnavailableError", True)
        assert got.headers["retry-after"] == "5"
        with pytest.raises(StorageUnavailableError, match="not there yet"):
            application.start()
        assert call(application).status == 202


def test_a_process_is_alive_without_its_database() -> None:
    with wrapped(Recorded(failures=1000)) as application:
        alive = call(application, REQUEST_METHOD="GET", PATH_INFO="/_edda/livez")
        assert (alive.status, alive.json) == (200, {"status": "ok"})
        assert call(application, REQUEST_METHOD="GET", PATH_INFO="/_edda/readyz").status == 503


def test_closing_drains_the_app_and_a_later_request_starts_it_again(app: Recorded, application: WSGIApp) -> None:
    assert call(application).status == 202
    application.close()
    assert app.state is State.STOPPED
    application.close()
    assert call(application).status == 202
    assert len(app.threads) == 2


def test_a_request_under_way_is_answered_before_it_is_closed(app: Recorded, application: WSGIApp) -> None:
    body = Held(b"{}")
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(call, application, **{"wsgi.input": body})
        assert body.asked.wait(TIMEOUT)
        closing = threads.submit(application.close)
        refused = call_until(application, 503)
        assert refused.json["retryable"] is True
        assert not closing.done()
        body.given.set()
        assert slow.result(TIMEOUT).status == 202
        closing.result(TIMEOUT)


class Held(io.BytesIO):
    """A body that arrives when the test releases it."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self.asked, self.given = threading.Event(), threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self.asked.set()
        assert self.given.wait(TIMEOUT)
        return super().read(size)


def call_until(application: WSGIApplication, status: int) -> Got:
    until = time.monotonic() + TIMEOUT
    while (got := call(application)).status != status:
        assert time.monotonic() < until, got
    return got


async def test_an_app_that_was_started_elsewhere_is_refused(app: Recorded, application: WSGIApp) -> None:
    async with app:
        got = await asyncio.to_thread(call, application)
        assert (got.status, got.json["error_type"]) == (503, "AppError")
        await asyncio.to_thread(application.close)
        assert app.state is State.STARTED


# Requests and responses


def test_the_response_to_an_unexpected_error_reveals_no_internals() -> None:
    class Broken(Recorded):
        async def __call__(self, *_: Any) -> None:
            raise ZeroDivisionError("a secret")

    with wrapped(Broken()) as application:
        got = call(application)
    assert (got.status, got.json["error_type"], got.json["retryable"]) == (500, "ZeroDivisionError", True)
    assert b"a secret" not in got.body
    assert got.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 200_000])
def test_a_body_of_any_length_arrives_whole(size: int) -> None:
    sent: list[Any] = []

    class Listening(Recorded):
        async def receive(self, events: Any) -> None:
            sent.extend(events)

    with wrapped(Listening()) as application:
        body = b"x" * size
        assert call(application, body, CONTENT_TYPE="application/octet-stream").status == 202
        ended = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True, "CONTENT_TYPE": "application/octet-stream"}
        assert call(application, body, **ended).status == 202
    assert [event.data or b"" for event in sent] == [body, body]


def test_without_a_length_and_an_end_there_is_no_body(application: WSGIApp) -> None:
    endless = Held(b"")
    got = call(application, CONTENT_LENGTH="", **{"wsgi.input": endless})
    assert got.status == 202
    assert not endless.asked.is_set()


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_half_a_body_is_not_stored(content_type: str) -> None:
    class Unreachable(Recorded):
        async def receive(self, events: Any) -> None:
            raise AssertionError("half a body was stored")

    with wrapped(Unreachable()) as application:
        got = call(application, b"{}", CONTENT_LENGTH="1000", CONTENT_TYPE=content_type)
        assert (got.status, got.body) == (400, b"")


def test_an_error_while_reading_the_body_ends_that_request_only(application: WSGIApp) -> None:
    class Torn(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("the client is gone")

    assert call(application, **{"wsgi.input": Torn()}).status == 400
    assert call(application).status == 202


def test_the_limits_are_those_of_every_request() -> None:
    with wrapped(Recorded(web=WebOptions(max_body=100))) as application:
        untouched = Held(b"")
        assert call(application, CONTENT_LENGTH="101", **{"wsgi.input": untouched}).status == 413
        assert not untouched.asked.is_set()
        endless = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True}
        assert call(application, b"x" * 101, **endless).status == 413
        assert call(application, CONTENT_LENGTH="1, 1").status == 400
        assert call(application, CONTENT_LENGTH="9" * 5000).status == 413
        assert call(application, **{f"HTTP_X_{number}": "y" for number in range(200)}).status == 431


def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            time.sleep(0.3)
            return super().read(1)

    with wrapped(Recorded(web=WebOptions(body_timeout=0.1))) as application:
        got = call(application, **{"wsgi.input": Slow(b"{}")})
        assert (got.status, got.json["retryable"]) == (408, True)
        assert "connection" not in got.headers  # the server's own header


def test_path_query_and_headers_arrive_as_sent(application: WSGIApp) -> None:
    assert call(application, PATH_INFO="/caf\xc3\xa9").status == 202  # UTF-8, as WSGI writes it
    assert call(application, PATH_INFO="/\xff").status == 202
    livez = {"REQUEST_METHOD": "GET", "SCRIPT_NAME": "/edda", "PATH_INFO": "/_edda/livez"}
    assert call(application, **livez).status == 200
    assert call(application, **livez | {"PATH_INFO": "/elsewhere"}).status == 405
    head = call(application, **livez | {"REQUEST_METHOD": "HEAD"})
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "15")
    assert call(application, HTTP_CE_SOURCE="/caf\xc3\xa9").status == 400  # as every server sends
    assert call(application, REQUEST_METHOD="OPTIONS").status == 204


@pytest.mark.parametrize(
    ("address", "status"), [("127.0.0.1", 202), ("::1", 202), ("", 202), ("192.0.2.7", 403), (None, 403)]
)
def test_without_tokens_only_this_machine_is_served(application: WSGIApp, address: str | None, status: int) -> None:
    """An empty address is a Unix socket; without an address the client is unknown."""
    assert call(application, REMOTE_ADDR=address).status == status


def test_a_token_in_the_query_is_removed_from_the_log() -> None:
    app = Recorded(tokens=f"shop:events:{SECRET}", web=WebOptions(query_token=True))
    query = f"a=1&access_token={SECRET}"
    environ: dict[str, Any] = {}

    def spy(given: dict[str, Any], start_response: Any) -> Any:
        environ.update(QUERY_STRING=given["QUERY_STRING"], given=given)
        return application(given, start_response)

    with wrapped(app) as application:
        assert call(spy, QUERY_STRING=query, RAW_URI=f"/events?{query}").status == 202
    assert SECRET in environ["QUERY_STRING"]
    assert environ["given"]["QUERY_STRING"] == "a=1&access_token=***"
    assert environ["given"]["RAW_URI"] == "/events?a=1&access_token=***"


@pytest.mark.parametrize("changes", [{}, {"CONTENT_TYPE": "text/plain", "HTTP_CE_ID": ""}, {"REQUEST_METHOD": "PUT"}])
def test_it_keeps_to_the_rules_of_wsgi(application: WSGIApp, changes: dict[str, str]) -> None:
    got = call(validator(application), b"{}", **changes)
    assert got.status in {202, 400, 405}


# With real servers


class Threaded(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Silent(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        return


@contextmanager
def served(application: WSGIApplication) -> Iterator[str]:
    with make_server("127.0.0.1", 0, application, Threaded, Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_runs_continue_between_requests(database: Database) -> None:
    done = threading.Event()

    @activity(name="wsgi_note")
    async def note(ctx: WorkflowContext) -> None:
        done.set()

    @workflow(name="wsgi_order")
    async def order(ctx: WorkflowContext, event: ReceivedEvent) -> None:
        await sleep(ctx, 0.05)
        await note(ctx)

    app = EddaApp("shop", storage=database.storage(), workflows=[order])
    app.on_event("order.created")(order)
    with (
        wrapped(app) as application,
        served(application) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=TIMEOUT) as client,
    ):
        assert client.post("/events", headers=HEADERS, content=b'{"a": 1}').status_code == 202
        assert done.wait(TIMEOUT)
        assert client.get("/_edda/readyz").json() == {"status": "ready"}


def url_of(database: Database) -> str:
    if isinstance(database, InFile):
        return f"sqlite:///{database.path}"
    assert isinstance(database, OnServer)
    return database.url


PROGRAM = """
import os
from edda import EddaApp, ReceivedEvent, WorkflowContext, activity, workflow
from edda.wsgi import create_wsgi_app

app = EddaApp("shop", {url!r})

@activity
def who(ctx: WorkflowContext) -> int:
    return os.getpid()

@app.on_event("order.created")
@workflow
async def order(ctx: WorkflowContext, event: ReceivedEvent) -> int:
    return await who(ctx)

application = create_wsgi_app(app)
"""


def write_program(folder: Path, database: Database, more: str = "") -> None:
    (folder / "wsgi_shop.py").write_text(PROGRAM.format(url=url_of(database)) + more)


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])}


@asynccontextmanager
async def gunicorn(folder: Path, *options: str) -> AsyncIterator[Server]:
    port = free_port()
    command = ["-m", "gunicorn", "wsgi_shop:application", "--bind", f"127.0.0.1:{port}", *options]
    async with running(command, **environment(folder)) as process:
        server = Server(process, port)
        await server.hear("Listening at")
        yield server


async def pids_of(database: Database) -> set[int]:
    storage = database.storage()
    await storage.open()
    try:
        await storage.migrate()
        return {one.info.pid for one in await storage.registered_workers()}
    finally:
        await storage.close()


@pytest.mark.parametrize(
    ("kind", "worker"), [("sqlite", "sync"), ("sqlite", "gthread"), ("postgres", "gthread"), ("mysql", "gthread")]
)
async def test_each_process_of_gunicorn_has_a_worker_of_its_own_and_drains_it(
    make_database: MakeDatabase, tmp_path: Path, kind: str, worker: str
) -> None:
    database = make_database(kind)
    write_program(tmp_path, database)
    threads = ("--threads", "4") if worker == "gthread" else ()
    async with gunicorn(tmp_path, "--preload", "--workers", "2", "--worker-class", worker, *threads) as server:
        sent = await post_until_all_have_started(server, database, workers=2)
        assert server.process.pid not in await pids_of(database)
        async with EddaApp("reader", storage=database.storage(), worker=False) as reader:
            found = (await reader.find_instances(workflow_name="order", limit=1000))["instances"]
            assert len(found) == sent
            pids = {await reader.handle(one["instance_id"]).result(timeout=TIMEOUT) for one in found}
        assert pids <= await pids_of(database)
        assert await server.stop() == 0
    assert await pids_of(database) == set()


async def post_until_all_have_started(server: Server, database: Database, *, workers: int) -> int:
    """The number of events that were sent. The process that accepts a connection is random."""
    sent = 0
    async with asyncio.timeout(TIMEOUT):
        while len(await pids_of(database)) < workers:
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    sent += 1
                    group.create_task(post(server, str(sent)))
    return sent


async def post(server: Server, id: str) -> None:
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        answer = await client.post("/events", headers=HEADERS | {"ce-id": id}, content=pieces(b"{", b"}"))
        assert (answer.status_code, answer.json()) == (202, {"status": "accepted"})


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """Without a length, and so in chunks."""
    for part in parts:
        yield part


HOOK = """
def post_worker_init(worker):
    from wsgi_shop import application
    application.start()
"""


async def test_gunicorn_can_start_the_app_without_a_request(make_database: MakeDatabase, tmp_path: Path) -> None:
    database = make_database("sqlite")
    write_program(tmp_path, database)
    (tmp_path / "gunicorn.conf.py").write_text(HOOK)
    async with gunicorn(tmp_path, "--preload", "--config", str(tmp_path / "gunicorn.conf.py")) as server:
        pids: set[int] = set()
        async with asyncio.timeout(TIMEOUT):
            while not pids:
                pids = await pids_of(database)
        assert server.process.pid not in pids
        assert await server.stop() == 0
    assert await pids_of(database) == set()


async def test_a_client_that_disconnects_does_not_disturb_gunicorn(make_database: MakeDatabase, tmp_path: Path) -> None:
    write_program(tmp_path, make_database("sqlite"))
    async with gunicorn(tmp_path, "--worker-class", "gthread", "--threads", "4") as server:
        head = "POST /events HTTP/1.1\r\nHost: localhost\r\n" + "".join(f"{k}: {v}\r\n" for k, v in HEADERS.items())
        for framing in ("Content-Length: 1000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
            for _ in range(10):
                _, writer = await server.connect()
                writer.write((head + framing).encode())
                await writer.drain()
                writer.close()
        await post(server, "1")
        async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
            large = await client.post("/events", headers=HEADERS, content=pieces(*[b"x" * 65536] * 20))
            assert large.status_code == 413
        await post(server, "2")
        assert await server.stop() == 0
        assert server.process.stdout is not None
        assert b"Traceback" not in await server.process.stdout.read()


FORKING = """
import io, os, sys
from tests.web.test_wsgi import call
from wsgi_shop import app, application

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        work()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0

def serve():
    print(call(application, HTTP_CE_ID=str(os.getpid())).status, flush=True)
"""


def run_program(folder: Path, text: str) -> list[str]:
    (folder / "program.py").write_text(FORKING + text)
    command = [sys.executable, str(folder / "program.py")]
    done = subprocess.run(
        command, env=os.environ | environment(folder), capture_output=True, text=True, timeout=TIMEOUT * 2
    )
    assert done.returncode == 0, done.stderr
    return [*done.stdout.split("\n")[:-1], *([done.stderr] if "Traceback" in done.stderr else [])]


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
async def test_an_app_made_before_a_fork_is_started_by_each_child_and_ends_with_it(
    make_database: MakeDatabase, tmp_path: Path, kind: str
) -> None:
    database = make_database(kind)
    write_program(tmp_path, database)
    said = await asyncio.to_thread(run_program, tmp_path, "in_child(serve)\nin_child(serve)\nserve()\n")
    assert said == ["202", "202", "202"]
    assert await pids_of(database) == set()  # all three were drained


async def test_an_app_that_was_started_before_a_fork_stays_with_its_parent(
    make_database: MakeDatabase, tmp_path: Path
) -> None:
    database = make_database("sqlite")
    write_program(tmp_path, database)
    said = await asyncio.to_thread(run_program, tmp_path, "serve()\nin_child(serve)\nserve()\n")
    assert [line for line in said if line.isdigit()] == ["202", "503", "202"]
    assert await pids_of(database) == set()


async def test_a_process_that_exits_while_a_step_runs_finishes_it(make_database: MakeDatabase, tmp_path: Path) -> None:
    """At exit, without a call of `close`."""
    database = make_database("sqlite")
    more = """
import time

@activity
def slow(ctx: WorkflowContext) -> str:
    print("running", flush=True)
    time.sleep(1)
    return "finished"

@app.on_event("slow.created")
@workflow
async def slow_order(ctx: WorkflowContext, event: ReceivedEvent) -> str:
    return await slow(ctx)
"""
    write_program(tmp_path, database, more)
    async with gunicorn(tmp_path, "--worker-class", "gthread", "--threads", "2") as server:
        async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
            await client.post("/events", headers=HEADERS | {"ce-type": "slow.created"}, content=b"{}")
        await server.hear("running")
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT):
            assert await server.process.wait() == 0
    async with EddaApp("reader", storage=database.storage(), worker=False) as reader:
        ((run,)) = (await reader.find_instances(workflow_name="slow_order"))["instances"]
        history = await reader.handle(run["instance_id"]).history()
        assert any(b"finished" in (entry.value or b"") for entry in history)
