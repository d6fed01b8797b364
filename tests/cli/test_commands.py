"""The requests that commands send to a controller, and the output of its responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edda.cli import main
from edda.cli.target import CommandTarget
from edda.control.controller import Controller
from edda.control.views import BulkRequest, EventRequest, OutboxRequest, RetryRequest, RunSearch, StartRequest
from tests.cli.fake_controller import COMPLETED, FAILED, NOON, WAITING, Showcase, a_run, with_bars

Edda = Callable[..., Result]
START = ("runs", "start", "ship", "--server", "http://127.0.0.1:1")


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
def edda(showcase: Showcase, monkeypatch: pytest.MonkeyPatch) -> Edda:
    @asynccontextmanager
    async def open_showcase(self: CommandTarget, worker: bool = False) -> AsyncIterator[Controller]:
        yield showcase

    monkeypatch.setattr(CommandTarget, "open", open_showcase)
    return lambda *arguments, **options: CliRunner().invoke(main, arguments, **options)


# Runs


def test_the_list_of_runs_shows_each_state_as_symbol_and_word(edda: Edda) -> None:
    listed = edda("runs", "list")
    assert listed.exit_code == 0
    lines = listed.output.splitlines()
    assert lines[0].split() == ["ID", "WORKFLOW", "STATE", "AGE"]
    assert "◷ waiting" in lines[1]
    assert "waits for payment.completed where order_id = A-17" in lines[1]
    assert "✖ failed" in lines[2]
    assert "✔ completed" in lines[3]


def test_filters_are_passed_on_as_they_were_given(edda: Edda, showcase: Showcase) -> None:
    options = ["--status", "failed", "--status", "parked", "--workflow", "ship", "--id", "or", "--text", "pay"]
    options += ["--input", "order.id=A-17", "--since", "2026-11-15T12:00+00:00", "--limit", "7"]
    assert edda("runs", "list", *options).exit_code == 0
    assert showcase.asked == [
        RunSearch(("failed", "parked"), "ship", "or", "pay", ("order.id=A-17",), since=NOON, limit=7)
    ]


@pytest.mark.parametrize("group", ["open", "waiting", "ended"])
def test_a_group_of_statuses_is_passed_to_the_controller(edda: Edda, showcase: Showcase, group: str) -> None:
    edda("runs", "list", "--status", group)
    assert showcase.asked[0].status == (group,)


def test_a_long_list_is_read_in_pages(edda: Edda, showcase: Showcase) -> None:
    showcase.runs = tuple(a_run(f"run-{number}") for number in range(450))
    assert len(json.loads(edda("runs", "list", "--all", "--json").output)) == 450
    assert [search.cursor for search in showcase.asked] == [None, "200", "400"]
    assert len(json.loads(edda("runs", "list", "--limit", "230", "--json").output)) == 230


def test_json_is_the_view_itself(edda: Edda) -> None:
    first = json.loads(edda("runs", "list", "--json").output)[0]
    assert first["id"] == "order-1"
    assert first["created_at"] == "2026-11-15T12:00:00Z"


def test_one_run_is_shown_with_its_timeline_its_error_and_its_history(edda: Edda) -> None:
    shown = edda("runs", "show", "order-2", "--history")
    assert shown.exit_code == 0
    for part in (
        "order-2  ship  ✖ failed  ValueError: no stock",
        "after 10 s",
        "• reserve",
        "↶ release",
        'input: {\n  "order_id": "A-17"\n}',
        "error: ValueError: no stock\nTraceback",
        '{ "shelf": 3 }',
    ):
        assert part in shown.output
    as_json = json.loads(edda("runs", "show", "order-2", "--json").output)
    assert as_json["detail"]["error"]["type"] == "ValueError"
    assert as_json["timeline"]["bars"][0]["name"] == "reserve"


def test_input_of_a_run_cannot_send_escape_sequences(edda: Edda, showcase: Showcase) -> None:
    showcase.runs = (a_run("\x1b]0;owned\x07", "failed", "failed: \x1b[2J"),)
    assert "\x1b" not in edda("runs", "list").output
    assert "\x1b" not in edda("runs", "show", "\x1b]0;owned\x07").output
    assert "\x1b" not in edda("runs", "watch", "\x1b]0;owned\x07").output


def test_a_run_that_is_not_there_is_an_error_in_one_line(edda: Edda) -> None:
    missing = edda("runs", "show", "nobody")
    assert missing.exit_code == 1
    assert missing.output == "Error: there is no run 'nobody'\n"


def test_watching_a_run_prints_each_step(edda: Edda, showcase: Showcase) -> None:
    showcase.timeline = with_bars(2)
    showcase.states = [WAITING, a_run("order-1", ended_at=NOON)]
    watched = edda("runs", "watch", "order-1")
    assert watched.exit_code == 0
    assert [line.strip() for line in watched.output.splitlines()] == [
        "step reserve: done, 2 attempts",
        "event payment.completed: done",
        "order-1  ship  ◷ waiting  waits for payment.completed where order_id = A-17",
        "order-1  ship  ✔ completed",
    ]


def test_a_program_reads_each_change_as_json_on_a_line(edda: Edda, showcase: Showcase) -> None:
    showcase.states = [WAITING, a_run("order-1", ended_at=NOON)]
    one = edda("runs", "watch", "order-1", "--json")
    assert [json.loads(line)["status"] for line in one.stdout.splitlines()] == ["waiting_for_event", "completed"]
    showcase.runs = (WAITING, FAILED)
    every = edda("runs", "watch", "--json")
    assert [json.loads(line)["id"] for line in every.stdout.splitlines()] == ["order-2", "order-1", "order-1"]


def test_watching_a_run_that_fails_is_a_failure(edda: Edda) -> None:
    watched = edda("runs", "watch", "order-2")
    assert watched.exit_code == 1
    assert "run order-2 failed: ValueError: no stock" in watched.output


def test_watching_the_list_prints_only_changes(edda: Edda, showcase: Showcase) -> None:
    showcase.states = [WAITING, a_run("order-1", ended_at=NOON)]
    lines = edda("runs", "watch").output.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["order-3", "order-2", "order-1", "order-1"]
    assert "Error: the stream of changes has ended" in lines[4]


def test_a_run_is_started_with_json_or_with_single_arguments(edda: Edda, showcase: Showcase, tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text('{"order_id": "A"}')
    assert edda(*START, "--input", f"@{file}").output == "new-1\n"
    assert edda(*START, "--input", "-", input='{"order_id": "B"}').exit_code == 0
    arguments = ["--arg", "order_id=C", "--arg", "count=3", "--arg", 'lines=[{"sku": 1}]', "--id", "mine"]
    assert edda(*START, *arguments).output == "mine\n"
    assert showcase.asked == [
        StartRequest("ship", {"order_id": "A"}),
        StartRequest("ship", {"order_id": "B"}),
        StartRequest("ship", {"order_id": "C", "count": 3, "lines": [{"sku": 1}]}, "mine"),
    ]


@pytest.mark.parametrize("database", [[], ["--db", "sqlite:///shop.db"]])
def test_start_without_code_says_what_to_pass(edda: Edda, showcase: Showcase, database: list[str]) -> None:
    refused = edda("runs", "start", "ship", *database)
    assert refused.exit_code == 2
    assert "starting ship needs its code" in refused.output
    assert "--app MODULE:APP" in refused.output
    assert "--server" in refused.output
    assert showcase.asked == []


def test_a_run_that_compensated_can_only_be_retried_from_its_start(edda: Edda) -> None:
    assert "possible actions: retry --from-start, delete" in edda("runs", "show", "order-2").output
    assert "possible actions: cancel\n" in edda("runs", "show", "order-1").output


def test_start_can_wait_for_the_result(edda: Edda) -> None:
    done = edda(*START, "--id", "order-3", "--wait")
    assert json.loads(done.stdout) == {"paid": True}
    failed = edda(*START, "--id", "order-2", "--wait")
    assert failed.exit_code == 1
    assert failed.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["--input", "{"], ["--input", "[]"], ["--input", "@/no/such/file"], ["--arg", "x"]]
)
def test_input_that_cannot_be_read_is_wrong_usage(edda: Edda, arguments: list[str]) -> None:
    refused = edda(*START, *arguments)
    assert refused.exit_code == 2
    assert arguments[0] in refused.output


def test_a_result_time_out_names_what_the_run_waits_for(edda: Edda) -> None:
    late = edda("runs", "result", "order-1", "--timeout", "0")
    assert late.exit_code == 1
    assert "order-1 has not ended within 0 s: it waits for payment.completed" in late.output
    assert json.loads(edda("runs", "result", "order-3", "--timeout", "0").stdout) == {"paid": True}


def test_one_run_is_acted_on_at_once(edda: Edda, showcase: Showcase) -> None:
    for action in ("cancel", "retry", "resume", "delete"):
        assert edda("runs", action, "order-1").output == "order-1 is done\n"
    edda("runs", "retry", "order-1", "--from-start")
    assert showcase.asked == [
        ("cancel", "order-1", "cancelled"),
        ("retry", "order-1", RetryRequest()),
        ("resume", "order-1"),
        ("delete", "order-1"),
        ("retry", "order-1", RetryRequest(from_start=True)),
    ]


def test_several_runs_are_counted_and_asked_about_first(edda: Edda, showcase: Showcase) -> None:
    refused = edda("runs", "cancel", "--status", "failed", input="n\n")
    assert refused.exit_code == 1
    assert "cancel 3 runs? [y/N]" in refused.output
    search = RunSearch(("failed",))
    assert showcase.asked == [BulkRequest("cancel", search=search, count_only=True)]
    assert edda("runs", "cancel", "--status", "failed", input="y\n").exit_code == 0
    assert showcase.asked[-1] == BulkRequest("cancel", search=search)


def test_yes_asks_nothing(edda: Edda, showcase: Showcase) -> None:
    done = edda("runs", "delete", "order-2", "order-3", "--yes")
    assert done.output == "delete: 2 done\n"
    assert showcase.asked == [BulkRequest("delete", ("order-2", "order-3"))]


@pytest.mark.parametrize("arguments", [[], ["order-1", "--status", "failed"]])
def test_an_action_has_to_say_which_runs(edda: Edda, arguments: list[str]) -> None:
    refused = edda("runs", "cancel", *arguments)
    assert refused.exit_code == 2
    assert "which runs to cancel: give either ids" in refused.output


def test_a_refused_action_prints_one_line(edda: Edda, showcase: Showcase) -> None:
    showcase.refuses = True
    refused = edda("runs", "cancel", "order-2")
    assert refused.exit_code == 1
    assert refused.output == "Error: run order-2 has ended: use retry\n"


def test_a_run_is_exported_to_a_file(edda: Edda, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert edda("runs", "export", "order-3", "-o", str(file)).exit_code == 0
    assert json.loads(file.read_text()) == json.loads(edda("runs", "export", "order-3").output)
    refused = edda("runs", "export", "order-3", "-o", str(tmp_path / "no" / "such" / "folder"))
    assert refused.exit_code == 1
    assert "cannot be written" in refused.output


# The others


def test_an_event_is_sent_with_all_its_options(edda: Edda, showcase: Showcase) -> None:
    options = ["--data", '{"amount": 3}', "--id", "e", "--subject", "s", "--target", "order-1"]
    assert edda("events", "send", "payment.completed", *options, "--extension", "tenant=a").exit_code == 0
    assert showcase.asked == [
        EventRequest("payment.completed", "/edda/cli", {"amount": 3}, "e", "s", "order-1", {"tenant": "a"})
    ]


def test_an_event_is_shown_with_its_consumers(edda: Edda) -> None:
    shown = edda("events", "show", "7")
    assert "→ order-3  ship  pay" in shown.output
    assert json.loads(edda("events", "show", "7", "--json").output)["data"] == {"amount": 3}
    assert edda("events", "list").output.splitlines()[1].split()[-3:] == ["payment.completed", "/shop", "e-1"]


def test_deleting_dead_events_needs_confirmation(edda: Edda, showcase: Showcase) -> None:
    assert edda("outbox", "drop", "--all", input="n\n").exit_code == 1
    assert showcase.asked == []
    assert edda("outbox", "drop", "--all", "--yes").output == "o-1 is done\n"
    assert edda("outbox", "drop", "o-1").exit_code == 0
    assert showcase.asked == [OutboxRequest(every=True), OutboxRequest(("o-1",))]


@pytest.mark.parametrize("command", ["workers", "workflows", "waits", "channels list", "audit"])
def test_each_list_is_a_table_or_json(edda: Edda, command: str) -> None:
    words = command.split()
    assert edda(*words).exit_code == 0
    rows: list[Any] = json.loads(edda(*words, "--json").output)
    assert len(edda(*words).output.splitlines()) == len(rows) + 1


def test_workers_are_alive_or_lost(edda: Edda) -> None:
    lines = edda("workers").output.splitlines()
    assert "● alive" in lines[1]
    assert "✖ lost" in lines[2]


def test_stats_show_the_backlog(edda: Edda) -> None:
    told = edda("stats").output
    for part in (
        "10000 or more",
        "▄█",
        "duration: median 12 ms",
        "runs ready for a worker: 3, the oldest for 1 min",
    ):
        assert part in told
    assert "staged events" not in told
    assert json.loads(edda("stats", "--json").output)["ready"] == 3


def test_a_workflow_without_source_has_no_graph(edda: Edda) -> None:
    refused = edda("graph", "ship")
    assert refused.exit_code == 1
    assert "no source" in refused.output


def test_db_and_server_exclude_each_other(edda: Edda) -> None:
    refused = edda("stats", "--db", "sqlite:///a.db", "--server", "http://127.0.0.1:1")
    assert refused.exit_code == 2
    assert "give one of them" in refused.output


def test_an_unreadable_moment_is_wrong_usage(edda: Edda, showcase: Showcase) -> None:
    assert edda("runs", "list", "--since", "yesterday").exit_code == 2
    assert edda("runs", "list", "--since", "2h").exit_code == 0
    assert showcase.asked[0].since is not None
    assert showcase.runs == (WAITING, FAILED, COMPLETED)
