"""The page about waiting for events runs as it is printed, block by block and word for word.

What the page leaves to its reader is supplied here: the activities that it only names, and, around the lines that are
taken out of a workflow, the workflow.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest

from edda import (
    EddaApp,
    EventTimeoutError,
    RunStatus,
    WorkflowContext,
    WorkflowHandle,
    activity,
)
from edda.testing import VirtualApp
from tests.engine.conditions import until_out_of_memory, until_status

from .pages import DOCS, blocks
from .terminals import PATIENCE, Terminal

PAGE = DOCS / "tutorial" / "waiting-for-events.md"
HOUR = 3600
PAYMENT = {"order_id": "ORD-123", "transaction_id": "TXN-456", "amount": 99.99, "status": "success"}
"""What the page sends, by curl and from Python."""


@activity
async def create_order(ctx: WorkflowContext, order_id: str) -> None: ...


@activity
async def check_payment_status(ctx: WorkflowContext, order_id: str) -> dict[str, bool]:
    return {"paid": order_id == "PAID"}


@activity
async def cancel_order(ctx: WorkflowContext, order_id: str) -> None: ...


@activity
async def submit_for_review(ctx: WorkflowContext, application_id: str) -> None: ...


@activity
async def process_approval(ctx: WorkflowContext, approval: dict[str, Any]) -> None: ...


SUPPLIED = (create_order, check_payment_status, cancel_order, submit_for_review, process_approval)


def snippet(words: str, language: str = "python") -> str:
    """The one block with these words in it."""
    (found,) = (block.text for block in blocks(PAGE) if block.language == language and words in block.text)
    return found


def is_a_program(text: str) -> bool:
    """Else it has an `await` outside of any function: lines out of a workflow."""
    try:
        compile(text, str(PAGE), "exec")
    except SyntaxError:
        return False
    return True


def definitions() -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == "python" and is_a_program(block.text)]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """The page's program, as a module."""
    module = sys.modules["event_waiting_page"] = ModuleType("event_waiting_page")
    vars(module).update({one.name: one for one in SUPPLIED}, asyncio=asyncio)
    for text in definitions():
        exec(text, vars(module))
    yield module
    del sys.modules["event_waiting_page"]


def in_workflow(page: Any, name: str, lines: str, ending: str = "") -> Any:
    """A workflow whose body is these lines of the page."""
    exec(f"@workflow\nasync def {name}(ctx: WorkflowContext):\n{indent(lines + ending, '    ')}", vars(page))
    return getattr(page, name)


async def run_lines(text: str) -> None:
    """As typed into `python -m asyncio`."""
    await eval(compile(text, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {})


@pytest.fixture
async def app() -> AsyncIterator[VirtualApp]:
    """Time stands still until it is moved: no wait is over before its event comes."""
    async with VirtualApp(auto_skip=False) as app:
        yield app


async def begin(app: VirtualApp, flow: Any, *arguments: str) -> WorkflowHandle[Any]:
    handle = app.handle(await app.start(flow, *arguments))
    await app.settle()
    return handle


def test_the_code_is_the_one_that_people_have_copied() -> None:
    """It is in other people's files: whatever becomes of Edda, these very lines have to run."""
    code = "".join(block.text for block in blocks(PAGE) if block.language == "python") + snippet("curl", "bash")
    digest = hashlib.sha256("".join(code.split()).encode()).hexdigest()
    assert digest == "8c63750eb826b564f6bce7909424ac3e557314a9428e335cff8d2dfcfe6c9e84"


async def test_the_payment_workflow_waits_and_goes_on_with_what_the_page_sends(
    page: Any, app: VirtualApp, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = await begin(app, page.payment_workflow, "ORD-123")
    assert await handle.status() is RunStatus.WAITING_FOR_EVENT
    await until_out_of_memory(app)
    await run_lines(snippet("await send_event("))
    assert await handle.result() == {"status": "completed", "payment_result": PAYMENT}
    assert [entry.step for entry in await handle.history()] == ["start_payment_processing:1", "payment.completed:1"]
    printed = capsys.readouterr().out
    assert printed.count("🔄 Starting payment for order ORD-123") == 1
    assert "Payment started: PAY-ORD-123" in printed
    assert f"✅ Payment completed: {PAYMENT}" in printed


async def test_the_payment_workflow_gives_up_after_five_minutes(page: Any, app: VirtualApp) -> None:
    handle = await begin(app, page.payment_workflow, "ORD-123")
    await app.advance(299)
    assert await handle.status() is RunStatus.WAITING_FOR_EVENT
    await app.advance(1)
    with pytest.raises(EventTimeoutError, match=r"300 seconds: payment\.completed"):
        await handle.result()


@pytest.mark.parametrize(
    ("order", "ending", "steps"),
    [
        ("PAID", {"status": "completed"}, ["create_order:1", "sleep:1", "check_payment_status:1"]),
        (
            "ORD-7",
            {"status": "cancelled", "reason": "payment_timeout"},
            ["create_order:1", "sleep:1", "check_payment_status:1", "cancel_order:1"],
        ),
    ],
)
async def test_the_order_with_a_timeout_looks_after_a_minute(
    page: Any, app: VirtualApp, order: str, ending: dict[str, str], steps: list[str]
) -> None:
    handle = await begin(app, page.order_with_timeout, order)
    await app.advance(59)
    assert await handle.status() is RunStatus.WAITING_FOR_TIMER
    await app.advance(1)
    assert await handle.result() == ending
    assert [entry.step for entry in await handle.history()] == steps


async def test_a_received_event_has_the_attributes_that_the_page_prints(
    page: Any, app: VirtualApp, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = in_workflow(page, "structure", snippet("print(event.source)"), "assert isinstance(event, ReceivedEvent)\n")
    handle = await begin(app, lines)
    await run_lines(snippet("await send_event("))
    await handle.result()
    assert capsys.readouterr().out.splitlines() == ["payment.completed", "payment-service", str(PAYMENT)]


async def test_the_typed_workflow_gets_its_model(
    page: Any, app: VirtualApp, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = await begin(app, page.payment_workflow_typed, "ORD-123")
    await run_lines(snippet("await send_event("))
    assert await handle.result() == {"status": "completed", "amount": 99.99}
    assert capsys.readouterr().out == "✅ Payment of $99.99 completed for order ORD-123\n   Transaction ID: TXN-456\n"


async def test_an_event_that_does_not_fit_fails_fast_says_what_is_wrong_and_leaves_the_order_alone(
    page: Any, app: VirtualApp, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await begin(app, page.payment_workflow_typed, "ORD-123")
    await app.send_event("payment.completed", "payment-service", {**PAYMENT, "amount": "a lot"})
    await app.settle()
    assert await handle.status() is RunStatus.WAITING_FOR_EVENT
    assert "does not fit PaymentCompleted:; amount: Input should be a valid number" in caplog.text
    await run_lines(snippet("await send_event("))
    assert await handle.result() == {"status": "completed", "amount": 99.99}


@pytest.mark.parametrize("words", ["No type checking", "Type-safe, IDE autocomplete"])
async def test_the_amount_is_read_with_and_without_a_model(page: Any, app: VirtualApp, words: str) -> None:
    handle = await begin(app, in_workflow(page, f"amount_{len(words)}", snippet(words), "return amount\n"))
    await run_lines(snippet("await send_event("))
    assert await handle.result() == 99.99


async def test_an_hour_of_asyncio_sleep_passes_outside_of_memory_too(page: Any, app: VirtualApp) -> None:
    lines = in_workflow(page, "sleeping", snippet("Keeps coroutine in memory"))
    for flow in (lines, page.bad_workflow, page.good_workflow):
        handle = await begin(app, flow)
        await app.advance(HOUR - 1)
        assert await handle.status() is RunStatus.WAITING_FOR_TIMER
        await app.advance(1)
        assert await handle.result() is None


async def test_a_loan_is_approved_in_the_48th_hour(page: Any, app: VirtualApp) -> None:
    handle = await begin(app, page.loan_approval_workflow, "LOAN-1")
    await app.advance(48 * HOUR - 1)
    await app.send_event("loan.approved", "bank", {"by": "Ada"})
    await handle.result()
    assert [entry.step for entry in await handle.history()] == [
        "submit_for_review:1",
        "loan.approved:1",
        "process_approval:1",
    ]


async def test_a_loan_is_not_approved_after_48_hours(page: Any, app: VirtualApp) -> None:
    handle = await begin(app, page.loan_approval_workflow, "LOAN-1")
    await app.advance(48 * HOUR)
    with pytest.raises(EventTimeoutError):
        await handle.result()


@pytest.mark.parametrize("early", [True, False])
async def test_an_order_is_fulfilled_by_three_events(page: Any, app: VirtualApp, early: bool) -> None:
    handle = app.handle(await app.start(page.order_fulfillment, "ORD-123"))
    for kind in ("order.packed", "order.picked_up", "order.delivered"):
        if not early:
            await app.settle()
            assert await handle.status() is RunStatus.WAITING_FOR_EVENT
        await app.send_event(kind, "warehouse")
    assert await handle.result() == {"status": "delivered"}


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    (tmp_path / "event_waiting_workflow.py").write_text("\n\n".join(definitions()))
    return Terminal(tmp_path)


def test_the_file_that_the_page_asks_for_runs(terminal: Terminal) -> None:
    done = terminal.run(snippet("python event_waiting_workflow.py", "bash"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


SERVICE = """
from edda import EddaApp
from event_waiting_workflow import payment_workflow

app = EddaApp("shop", "sqlite:///shop.db")
"""


@pytest.fixture
def served(terminal: Terminal, port: int) -> Iterator[Terminal]:
    """The page's own file, with an app, served by the page's own command."""
    (terminal.folder / "shop.py").write_text(SERVICE)
    with terminal.background(snippet("edda serve", "bash")) as server:
        server.hear(f"edda listens on http://127.0.0.1:{port}")
        yield terminal


@pytest.mark.processes
async def test_the_curl_command_of_the_page_wakes_the_run(page: Any, served: Terminal) -> None:
    async with EddaApp("test", f"sqlite:///{served.folder}/shop.db", worker=False) as app:
        handle = app.handle(await app.start(page.payment_workflow, "ORD-123"))
        await until_status(app, handle.instance_id, RunStatus.WAITING_FOR_EVENT)
        assert served.curl(snippet("curl", "bash")) == (202, snippet("accepted", "text").strip())
        assert await handle.result(PATIENCE) == {"status": "completed", "payment_result": PAYMENT}


@pytest.mark.processes
def test_what_is_no_cloudevent_is_refused_for_good(served: Terminal) -> None:
    broken = snippet("curl", "bash").replace('"specversion": "1.0",', "")
    status, body = served.curl(broken)
    assert status == 400
    assert '"retryable":false' in body
