"""Every command in a process of its own, on one database."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edda.cli import main
from edda.databases import open_storage
from tests.cli.shell import APP, PATIENCE, Shell, make_tables
from tests.conftest import MakeDatabase
from tests.engine.conditions import until
from tests.engine.conftest import url_of
from tests.outbox.outbox_rows import put
from tests.outbox.receiver import Answer, receiving

pytestmark = pytest.mark.processes

TYPED_IN = ("test_acceptance.py", "test_serving.py", "test_watch.py")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
async def shell(url: str, tmp_path: Path) -> Shell:
    """On a database with its tables."""
    await make_tables(url)
    return Shell({"EDDA_DB_URL": url, "EDDA_TEST_FIXED": str(tmp_path / "fixed")})


async def tell_a_story(shell: Shell, *code: str) -> str:
    """Start a run, see it wait, answer it, see it finish; `code` says where the workflow is."""
    run_id = await shell.do("runs", "start", "ship", *code, "--arg", "order_id=A-17")
    async with shell.running("runs", "watch", run_id) as watching:
        await watching.hear("waits for payment.completed")
        waits = await shell.read("waits", "--type", "payment.completed")
        assert [(wait["run_id"], wait["match"]) for wait in waits] == [(run_id, {"order_id": "A-17"})]
        assert "✉ payment.completed" in await shell.do("runs", "show", run_id)
        await shell.do("events", "send", "payment.completed", "--data", '{"order_id": "A-17", "amount": 3}')
        result = json.loads(await shell.do("runs", "result", run_id, "--timeout", "30"))
        assert result == {"shelf": "shelf of A-17", "amount": 3, "count": 1}
        await watching.hear("✔ completed")
        async with asyncio.timeout(PATIENCE):
            assert await watching.process.wait() == 0
    return run_id


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_run_is_started_watched_answered_and_finished(kind: str, make_database: MakeDatabase) -> None:
    shell = Shell({"EDDA_DB_URL": url_of(make_database(kind))})
    await make_tables(shell.environment["EDDA_DB_URL"])
    async with shell.running("worker", APP) as worker:
        await worker.hear("is running")
        run_id = await tell_a_story(shell, "--app", APP)
    (run,) = await shell.read("runs", "list", "--status", "completed", "--input", "order_id=A-17")
    assert (run["id"], run["workflow"]) == (run_id, "ship")
    (event,) = await shell.read("events", "list", "--type", "payment.completed")
    assert (await shell.read("events", "show", str(event["number"])))["consumers"][0]["run_id"] == run_id


async def test_the_same_is_done_at_a_server_with_a_token(url: str) -> None:
    secret = secrets.token_urlsafe(32)
    tokens = f"ops:view+control+events:{secret}"
    server = Shell({"EDDA_DB_URL": url, "EDDA_TOKENS": tokens})
    async with server.running("serve", APP, "--port", "0") as serving:
        address = (await serving.hear("edda listens on")).split()[-1]
        shell = Shell({"EDDA_SERVER": address, "EDDA_TOKEN": secret})
        await tell_a_story(shell)
        assert {one["who"] for one in await shell.read("audit")} == {"ops"}
        stranger = await Shell({"EDDA_SERVER": address}).run("runs", "list")
        assert stranger.code == 1
        assert "token" in stranger.err
        async with shell.running("runs", "watch") as watching:
            await watching.hear("✔ completed")
            assert await serving.stop() == 0, "an open stream does not keep a server from stopping"


async def test_overview_commands_show_a_live_worker(shell: Shell) -> None:
    async with shell.running("worker", APP) as worker:
        await worker.hear("is running")
        (alive,) = await shell.read("workers")
        assert (alive["service"], alive["is_alive"]) == ("shop", True)
        known = {one["workflow"]: one for one in await shell.read("workflows")}
        assert known["ship"]["documentation"].startswith("Reserve, wait for the payment")
        drawn = await shell.do("graph", "ship")
        for part in ("• reserve", "✉ event payment.completed", "■ return"):
            assert part in drawn
        assert (await shell.read("stats"))["workers"] == 1
        assert await shell.read("channels", "list") == []
        assert await worker.stop() == 0


async def test_a_message_is_published_to_a_run_that_waits_for_it(shell: Shell) -> None:
    run_id = await shell.do("runs", "start", "listen", "--app", APP)
    async with shell.running("worker", APP):
        async with shell.running("runs", "watch", run_id) as watching:
            await watching.hear("waits for a message on counter")
        (channel,) = await shell.read("channels", "list")
        assert (channel["name"], channel["waiting"]) == ("counter", 1)
        refused = await shell.run("channels", "publish", "counter", "--target", "nobody")
        assert refused.code == 1
        await shell.do("channels", "publish", "counter", "--data", '{"call": "A-17"}')
        assert json.loads(await shell.do("runs", "result", run_id, "--timeout", "30")) == "A-17"
    assert [one["action"] for one in await shell.read("audit")] == ["publish message", "start"]


async def test_a_run_that_failed_is_retried_when_its_reason_is_gone(shell: Shell, tmp_path: Path) -> None:
    failed = await shell.run("runs", "start", "wrap", "--app", APP, "--arg", "order_id=B", "--wait", "--id", "wrap-B")
    assert failed.code == 1
    assert "no box for B" in failed.err
    assert "▓" in await shell.do("runs", "show", "wrap-B", "--history")
    (tmp_path / "fixed").touch()
    await shell.do("runs", "retry", "wrap-B")
    async with shell.running("worker", APP):
        assert json.loads(await shell.do("runs", "result", "wrap-B")) == "box of B"
    assert (await shell.run("runs", "retry", "wrap-B")).code == 1
    assert json.loads(await shell.do("runs", "export", "wrap-B"))["detail"]["result"] == "box of B"
    await shell.do("runs", "delete", "wrap-B")
    assert (await shell.run("runs", "show", "wrap-B")).code == 1
    assert [one["action"] for one in await shell.read("audit")] == ["delete", "retry", "start"]


async def test_runs_are_cancelled_by_a_filter_with_a_count_first(shell: Shell) -> None:
    for name in ("C", "D"):
        await shell.do("runs", "start", "ship", "--app", APP, "--arg", f"order_id={name}", "--id", f"ship-{name}")
    asked = await shell.run("runs", "cancel", "--workflow", "ship", stdin="n\n")
    assert asked.code == 1
    assert "cancel 2 runs?" in asked.err
    await shell.do("runs", "cancel", "--workflow", "ship", "--yes")
    async with shell.running("worker", APP):
        ended = await shell.run("runs", "result", "ship-C", "--timeout", "30")
        assert ended.code == 1
        assert "cancelled" in ended.err
        await shell.run("runs", "result", "ship-D", "--timeout", "30")
    assert len(await shell.read("runs", "list", "--status", "cancelled")) == 2
    assert (await shell.run("runs", "resume", "ship-C")).code == 1


async def test_a_parked_run_is_resumed_when_its_code_is_mended(shell: Shell, tmp_path: Path) -> None:
    await shell.do("runs", "start", "weigh", "--app", APP, "--arg", "order_id=F", "--id", "weigh-F")
    async with shell.running("worker", APP):
        async with shell.running("runs", "watch", "weigh-F") as watching:
            await watching.hear("parked")
        (tmp_path / "fixed").touch()
        await shell.do("runs", "resume", "weigh-F")
        assert json.loads(await shell.do("runs", "result", "weigh-F", "--timeout", "30")) == "weight of shelf of F"
    assert [one["action"] for one in await shell.read("audit")] == ["resume", "start"]


async def test_an_event_is_sent_again(shell: Shell) -> None:
    await shell.do("events", "send", "order.created", "--data", "{}", "--id", "one")
    (event,) = await shell.read("events", "list")
    await shell.do("events", "resend", str(event["number"]))
    assert [one["type"] for one in await shell.read("events", "list")] == ["order.created", "order.created"]


async def test_rejected_events_are_retried_or_deleted(shell: Shell, url: str) -> None:
    assert await shell.do("outbox", "list") == "no events"
    refused = {"1", "2"}
    async with receiving(lambda request, attempt: Answer(400 if request.event_id in refused else 202)) as receiver:
        async with shell.running("outbox", "relay", "--broker-url", receiver.url) as relay:
            await relay.hear("is running")
            await put_events(url, ["1", "2", "3"])
            await until(lambda: has_states(shell, {"1": "dead", "2": "dead", "3": "sent"}), "two are refused")
            refused.clear()
            assert await shell.do("outbox", "retry", "1") == "1 dead event is sent again"
            await until(lambda: has_states(shell, {"1": "sent", "2": "dead", "3": "sent"}), "one is taken now")
            assert await shell.do("outbox", "drop", "--all", "--yes") == "1 dead event is deleted"
            assert await relay.stop() == 0
        assert receiver.ids == ["3", "1"]
    assert await has_states(shell, {"1": "sent", "3": "sent"})


async def put_events(url: str, ids: list[str]) -> None:
    storage = open_storage(url)
    await storage.open()
    await put(storage, ids)
    await storage.close()


async def has_states(shell: Shell, states: dict[str, str]) -> bool:
    return {one["id"]: one["state"] for one in await shell.read("outbox", "list")} == states


async def test_ctrl_c_ends_watching_quietly(shell: Shell) -> None:
    await shell.do("runs", "start", "ship", "--app", APP, "--arg", "order_id=E", "--id", "ship-E")
    async with shell.running("runs", "watch") as watching:
        await watching.hear("ship-E")
        watching.process.send_signal(signal.SIGINT)
        rest, _ = await watching.process.communicate()
        assert rest == b""
        assert watching.process.returncode == 130


async def test_a_database_is_migrated_checked_and_its_sql_shown(url: str) -> None:
    shell = Shell({"EDDA_DB_URL": url})
    assert (await shell.run("migrate", "--check")).code == 1
    sql = await shell.do("migrate", "--sql")
    assert "CREATE TABLE" in sql
    assert (await shell.run("migrate", "--check")).code == 1
    assert "applied 0001_initial" in await shell.do("migrate")
    assert await shell.do("migrate", "--check") == "the schema is up to date"
    assert await shell.do("migrate", "--sql") == "-- the schema is up to date"


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
async def test_the_doctor_finds_nothing_wrong_with_a_good_database(kind: str, make_database: MakeDatabase) -> None:
    shell = Shell({"EDDA_DB_URL": url_of(make_database(kind))})
    await make_tables(shell.environment["EDDA_DB_URL"])
    findings = {one["subject"]: one for one in await shell.read("doctor")}
    assert findings["schema"]["words"] == "up to date"
    assert "clock" in findings
    assert ("SQLite" if kind == "sqlite" else "server") in findings
    assert ("connections" in findings) == (kind != "sqlite")


async def test_the_doctor_prints_problems_and_remedies(tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    shell = Shell({"EDDA_DB_URL": f"sqlite:///{file}"})
    missing = await shell.run("doctor")
    assert missing.code == 1
    assert f"✖ database: the file {file} does not exist" in missing.out
    await asyncio.to_thread(file.touch)
    empty = await shell.run("doctor")
    assert empty.code == 1
    assert "→ run `edda migrate`" in empty.out
    away = await shell.run("doctor", "--db", "postgresql://nobody@127.0.0.1:1/nothing")
    assert away.code == 1
    assert "✖ database" in away.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs", "list", "--db", "sqlite:////no/such/file.db"], "the file /no/such/file.db does not exist"),
        (["runs", "list", "--db", "oracle://x"], "expected sqlite:///file.db"),
        (["stats", "--server", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (["runs", "show", "nobody"], "nobody"),
        (["runs", "start", "ship"], "ship"),
        (["runs", "start", "ship", "--app", APP, "--arg", "wrong=1"], "wrong"),
        (["graph", "nothing"], "nothing"),
        (["events", "resend", "17"], "17"),
        (["runs", "list", "--input", "nonsense"], "expected path=value"),
        (["stats", "--app", "tests.cli.nothing:app"], "cannot be loaded"),
    ],
)
async def test_an_error_is_one_line_that_names_the_thing(shell: Shell, arguments: list[str], words: str) -> None:
    said = await shell.run(*arguments)
    assert said.code in {1, 2}
    assert said.out == ""
    assert words in said.err.splitlines()[-1]


def test_every_command_is_typed_here_or_where_it_serves() -> None:
    typed = {words for file in TYPED_IN for words in words_of_calls(Path(__file__).with_name(file))}
    untyped = [name for name in commands(main) if not any(words[: len(name)] == name for words in typed)]
    assert untyped == []


def commands(command: click.Command, name: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield name
        return
    for word, part in command.commands.items():
        yield from commands(part, (*name, word))


def words_of_calls(file: Path) -> Iterator[tuple[str, ...]]:
    """What is written down as arguments, up to the first that is not."""
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call):
            yield tuple(itertools.takewhile(bool, (literal(argument) for argument in call.args)))


def literal(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""
