"""The example that waits for an event, played in two terminals."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import ROOT
from .terminals import Program, Terminal
from .test_event_waiting_page import snippet

EXAMPLE = f"python -W error {ROOT / 'examples' / 'event_waiting_workflow.py'}"

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("port")]


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)


def check_that_both_wait(said: str) -> None:
    assert '⏸️  ORD-123: waiting_for_event (payment.completed where order_id = "ORD-123")' in said
    assert "⏸️  ORD-124: waiting_for_timer" in said
    assert "in this process: 0" in said


def check_that_both_end(program: Program) -> None:
    assert program.end() == 0, program.said
    assert "🏁 ORD-123: PAY-ORD-123 completed with TXN-456 over 99.99" in program.said
    assert "🏁 ORD-124: cancelled: not paid after 3 seconds" in program.said


def test_the_order_goes_on_when_the_second_terminal_types_what_the_first_one_says(terminal: Terminal) -> None:
    with terminal.background(EXAMPLE) as first:
        said = first.hear("--send")
        check_that_both_wait(said)
        command = "curl" + said.partition("curl")[2].partition("}'")[0] + "}'\n"
        assert command in snippet("curl", "bash")
        assert terminal.curl(command) == (202, '{"status":"accepted"}')
        check_that_both_end(first)


def test_the_event_is_sent_without_curl_too(terminal: Terminal) -> None:
    with terminal.background(EXAMPLE) as first:
        check_that_both_wait(first.hear("--send"))
        second = terminal.run(f"{EXAMPLE} --send")
        assert second.returncode == 0, second.stderr
        assert second.stdout.startswith("📨 sent payment.completed")
        check_that_both_end(first)


def test_it_plays_both_terminals_itself(terminal: Terminal) -> None:
    with terminal.background(f"{EXAMPLE} --once") as alone:
        check_that_both_wait(alone.hear("in this process"))
        check_that_both_end(alone)


def test_ctrl_c_ends_it_quietly(terminal: Terminal) -> None:
    with terminal.background(EXAMPLE) as first:
        first.hear("--send")
        first.interrupt()
    assert first.process.returncode == 0
    assert first.said.endswith("Stopped.\n")
    assert "Traceback" not in first.said


def test_who_sends_to_nobody_is_told(terminal: Terminal) -> None:
    done = terminal.run(f"{EXAMPLE} --send")
    assert done.returncode == 1
    assert "Is the first terminal still running?" in done.stderr


def test_a_port_that_is_taken_is_named(terminal: Terminal) -> None:
    with terminal.background(EXAMPLE) as first:
        first.hear("--send")
        done = terminal.run(EXAMPLE)
    assert done.returncode == 1
    assert done.stderr.startswith("port 8001 cannot be used")
