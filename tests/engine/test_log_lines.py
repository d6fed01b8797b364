"""What the engine logs: for each situation exactly these lines, with their levels and fields, and none on replay."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    on_failure,
    register_compensation,
    sleep,
    wait_event,
    workflow,
)
from edda.core.redact import show_url
from edda.engine import log
from tests.conftest import Database

from .conditions import until, until_status
from .conftest import MORTAL, RESTLESS, MakeApp, url_of
from .processes import ROOT, program
from .programs import logging_worker

THREE = RetryPolicy(initial_interval=0.0, max_attempts=3)
SECRET = "s3cr3t-value"


@dataclass(frozen=True)
class Expected:
    level: int
    line: str
    fields: dict[str, Any] = field(default_factory=dict)


def info(line: str, **fields: Any) -> Expected:
    return Expected(logging.INFO, line, fields)


def warning(line: str, **fields: Any) -> Expected:
    return Expected(logging.WARNING, line, fields)


def error(line: str, **fields: Any) -> Expected:
    return Expected(logging.ERROR, line, fields)


def debug(line: str, **fields: Any) -> Expected:
    return Expected(logging.DEBUG, line, fields)


class Lines(logging.Handler):
    """The records about runs, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def of_runs(self) -> list[logging.LogRecord]:
        return [record for record in self.records if record.name == "edda.run"]

    def names(self, *wanted: str) -> list[str]:
        names = [line_of(record) for record in self.of_runs]
        return [name for name in names if not wanted or name in wanted]


def line_of(record: logging.LogRecord) -> str:
    return str(vars(record)["edda_line"])


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name.removeprefix("edda_"): value for name, value in vars(record).items() if name.startswith("edda_")}


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("edda")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


Act = Callable[[EddaApp], Awaitable[None]]
SITUATIONS: list[tuple[str, Act, list[Expected]]] = []


def situation(*expected: Expected) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        SITUATIONS.append((act.__name__, act, list(expected)))
        return act

    return add


async def ends(app: EddaApp, order: Any, *args: Any) -> None:
    """Whatever it ends with."""
    try:
        await app.run(order.options(id="A-17"), *args)
    except Exception:  # the subject is what is logged of it
        return


@situation()
async def a_happy_run(app: EddaApp) -> None:
    @activity
    async def step(ctx: WorkflowContext, number: int) -> int:
        return number

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        await sleep(ctx, 0.02)
        return sum([await step(ctx, number) for number in range(5)])

    await ends(app, order)


@situation(
    info("step_retry", step="flaky:1", attempt=1, error="ConnectionError: no answer", workflow="order", run="A-17"),
    info("step_retry", step="flaky:1", attempt=2, error="ConnectionError: no answer", delay=0.0),
)
async def two_attempts_fail(app: EddaApp) -> None:
    @activity(retry_policy=THREE)
    async def flaky(ctx: WorkflowContext) -> None:
        if ctx.attempt < 3:
            raise ConnectionError("no answer")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await flaky(ctx)
        await sleep(ctx, 0.02)  # it leaves memory and is replayed

    await ends(app, order)


@situation(
    info("step_retry", attempt=1),
    info("step_retry", attempt=2),
    warning("retries_exhausted", step="broken:1", attempt=3, error="ConnectionError: no answer"),
    warning("run_failed", run="A-17", workflow="order"),
)
async def all_attempts_fail(app: EddaApp) -> None:
    @activity(retry_policy=THREE)
    async def broken(ctx: WorkflowContext) -> None:
        raise ConnectionError("no answer")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await broken(ctx)

    await ends(app, order)


@situation(
    warning("result_mismatch", step="total:1", path=".amount", error="expected int, got str", run="A-17"),
    warning("result_mismatch", step="order", path="", error="expected int, got str"),
)
async def results_do_not_fit_their_annotations(app: EddaApp) -> None:
    @dataclass
    class Total:
        amount: int

    @activity
    async def total(ctx: WorkflowContext) -> Any:
        wrong: Any = "9"
        return Total(wrong)

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        await total(ctx)
        await sleep(ctx, 0.02)  # it leaves memory and is replayed
        return "9"

    total.signature.__dict__["returns"] = Total
    order.signature.__dict__["returns"] = int
    await ends(app, order)


@situation(
    warning("step_failed", step="refused:1", attempt=1, error="TerminalError: card expired"),
    warning("run_failed", error="TerminalError: card expired"),
)
async def a_step_fails_for_good(app: EddaApp) -> None:
    @activity
    async def refused(ctx: WorkflowContext) -> None:
        raise TerminalError("card expired")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await refused(ctx)

    await ends(app, order)


@situation(warning("run_failed", error="KeyError: 'price'"))
async def the_workflows_own_code_fails(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await sleep(ctx, 0.02)
        raise KeyError("price")

    await ends(app, order)


@situation(warning("run_failed", error="PayloadError: the result of order A-17 cannot be stored: $: object cannot be*"))
async def the_result_cannot_be_stored(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return object()

    await ends(app, order)


@situation(
    info("cancel_received", run="A-17", workflow="order", reason="changed my mind"),
    info("run_cancelled", run="A-17", reason="changed my mind"),
)
async def a_cancel(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    run = await app.start(order.options(id="A-17"))
    await until_status(app, run, RunStatus.WAITING_FOR_EVENT)
    await app.cancel(run, "changed my mind")
    await until_status(app, run, RunStatus.CANCELLED)


@situation(info("deadline_passed", run="A-17"), warning("run_failed", error="WorkflowTimeoutError: order A-17 passed*"))
async def a_deadline(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    await ends(app, _Timed(order))


class _Timed:
    """`order` with a deadline, for `ends`."""

    def __init__(self, order: Any) -> None:
        self._order = order

    def options(self, *, id: str) -> Any:
        return self._order.options(id=id, timeout=0.05)


@situation(
    warning("run_failed", error="ValueError: out of stock"),
)
async def a_failure_without_anything_to_undo(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        raise ValueError("out of stock")

    await ends(app, order)


@situation(
    warning("compensation_begun", run="A-17", workflow="order"),
    warning("run_failed", error="ValueError: out of stock"),
)
async def a_compensation(app: EddaApp) -> None:
    async def refund(ctx: WorkflowContext) -> None:
        await asyncio.sleep(0)

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> None:
        pass

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)
        raise ValueError("out of stock")

    await ends(app, order)


@situation(
    warning("compensation_begun"),
    info("step_retry", step="undo:1/refund", attempt=1),
    info("step_retry", step="undo:1/refund", attempt=2),
    error("compensation_failed", step="undo:1/refund", attempt=3, error="ConnectionError: no answer"),
    warning("run_failed", error="CompensationError: *"),
)
async def a_compensation_that_fails(app: EddaApp) -> None:
    @activity(retry_policy=THREE)
    async def refund(ctx: WorkflowContext) -> None:
        raise ConnectionError("no answer")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)
        raise ValueError("out of stock")

    await ends(app, order)


@situation(warning("run_parked", run="A-17", workflow="order", error="DeadlockError: every branch waits*"))
async def a_parked_run(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    run = await app.start(order.options(id="A-17"))
    await until_status(app, run, RunStatus.PARKED)


@situation(
    warning("run_parked", workflow="order", error="DeadlockError: every branch waits*"),
    warning("more_runs_parked", workflow="order", runs=19),
)
async def many_parked_runs(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    runs = [await app.start(order) for _ in range(20)]
    for run in runs:
        await until_status(app, run, RunStatus.PARKED)
        await app.client.resume_run(run)  # it is parked once more
    for run in runs:
        await until_status(app, run, RunStatus.PARKED)
    await app.shutdown()


@situation(warning("run_parked"), info("run_resumed", run="A-17", workflow="order"))
async def a_parked_run_that_goes_on(app: EddaApp) -> None:
    is_mended = False

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        if not is_mended:
            await asyncio.Event().wait()

    run = await app.start(order.options(id="A-17"))
    await until_status(app, run, RunStatus.PARKED)
    is_mended = True
    await app.client.resume_run(run)
    await until_status(app, run, RunStatus.COMPLETED)


@situation(
    warning("run_parked"), warning("run_ends_unread", run="A-17", error="NonDeterminismError*"), info("run_cancelled")
)
async def a_parked_run_that_is_cancelled(app: EddaApp) -> None:
    is_changed = False

    @activity
    async def step(ctx: WorkflowContext, number: int) -> int:
        return number

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await step(ctx, 2 if is_changed else 1)
        await asyncio.Event().wait()

    run = await app.start(order.options(id="A-17"))
    await until_status(app, run, RunStatus.PARKED)
    is_changed = True
    await app.cancel(run)
    await until_status(app, run, RunStatus.CANCELLED)


@situation(warning("steps_unfinished", run="A-17", workflow="order", steps="step:1"))
async def a_task_that_is_not_awaited(app: EddaApp) -> None:
    @activity
    async def step(ctx: WorkflowContext) -> None:
        await asyncio.sleep(60)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        asyncio.create_task(step(ctx), name="step")  # noqa: RUF006 - the very mistake
        await asyncio.sleep(0)

    await ends(app, order)


def fits(record: logging.LogRecord, expected: Expected) -> bool:
    told = fields_of(record)
    same = record.levelno == expected.level and told["line"] == expected.line
    return same and all(_is_like(told.get(name), value) for name, value in expected.fields.items())


def _is_like(told: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and wanted.endswith("*"):
        return str(told).startswith(wanted[:-1])
    return bool(told == wanted)


@pytest.mark.parametrize(("act", "expected"), [one[1:] for one in SITUATIONS], ids=[one[0] for one in SITUATIONS])
async def test_each_situation_writes_exactly_its_lines(
    lines: Lines, make_app: MakeApp, act: Act, expected: list[Expected]
) -> None:
    app = await make_app(settings=RESTLESS)
    await act(app)
    await until(lambda: len(lines.of_runs) >= len(expected), "its lines are written")
    shown = [(record.levelname, fields_of(record)) for record in lines.of_runs]
    assert len(shown) == len(expected), shown
    for record, wanted in zip(lines.of_runs, expected, strict=True):
        assert fits(record, wanted), (shown, wanted)


async def test_a_record_has_the_fields_of_its_line_and_a_readable_message(lines: Lines, make_app: MakeApp) -> None:
    logging.getLogger("edda").setLevel(logging.DEBUG)
    app = await make_app(settings=RESTLESS)
    await all_attempts_fail(app)
    await until(lambda: "run_failed" in lines.names(), "the run has failed")
    for record in lines.records:
        if "edda_line" in vars(record):
            line = log.LINES[line_of(record)]
            assert set(line.fields) <= fields_of(record).keys()
            assert (record.name, record.levelno) == (line.logger.name, line.level)
            assert "%(" not in record.getMessage()
    retry = next(record for record in lines.of_runs if line_of(record) == "step_retry")
    assert re.fullmatch(
        r"run A-17 of order: broken:1 failed on attempt 1, next try in 0\.0 s at \S+: ConnectionError: no answer",
        retry.getMessage(),
    )


async def test_debug_tells_every_move_of_a_run(lines: Lines, make_app: MakeApp) -> None:
    logging.getLogger("edda").setLevel(logging.DEBUG)
    app = await make_app(settings=RESTLESS)

    @activity
    async def pack(ctx: WorkflowContext, number: str) -> str:
        return f"{number} {SECRET}"

    @workflow
    async def order(ctx: WorkflowContext, number: str) -> str:
        parcel = await pack(ctx, number)
        await wait_event(ctx, "paid", match={"number": SECRET})
        return parcel

    run = await app.start(order.options(id="A-17"), SECRET)
    await until(lambda: "run_suspended" in lines.names(), "it waits")
    await app.send_event("paid", "/bank", {"number": SECRET})
    await app.handle(run).result(timeout=30)
    await until(lambda: "run_completed" in lines.names(), "its end is told")
    # A chosen id is stored first, for any worker to claim.
    assert lines.names() == [
        *("run_claimed", "run_started", "step_begun", "step_recorded", "run_suspended", "run_claimed", "run_completed")
    ]
    waiting = next(record for record in lines.of_runs if line_of(record) == "run_suspended")
    assert fields_of(waiting)["status"] == "waiting_for_event"
    assert "paid" in fields_of(waiting)["waits_for"]
    everything = "\n".join(f"{record.getMessage()} {vars(record)}" for record in lines.records)
    assert SECRET not in everything, "neither arguments nor results nor what is matched"


async def test_a_step_that_fails_ten_times_writes_ten_lines(lines: Lines, make_app: MakeApp) -> None:
    app = await make_app(settings=RESTLESS)

    @activity(retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=10))
    async def broken(ctx: WorkflowContext) -> None:
        raise ConnectionError(f"number {ctx.attempt}")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.01)
        try:
            await broken(ctx)
        except Exception:
            await sleep(ctx, 0.01)
            await sleep(ctx, 0.01)
        return "shipped without it"

    assert await app.run(order) == "shipped without it"
    told = [(line_of(record), fields_of(record)["attempt"]) for record in lines.of_runs]
    assert told == [*(("step_retry", number) for number in range(1, 10)), ("retries_exhausted", 10)]


async def test_a_worker_that_dies_leaves_no_lines_to_be_written_again(lines: Lines, make_app: MakeApp) -> None:
    """The first app dies after two of four attempts; the second replays them and writes only its own."""
    first = await make_app(settings=MORTAL)

    @activity(retry_policy=RetryPolicy(initial_interval=0.05, max_attempts=4, jitter=0.0))
    async def broken(ctx: WorkflowContext) -> None:
        raise ConnectionError("no answer")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await broken(ctx)

    run = await first.start(order.options(id="A-17"))
    await until(lambda: len(lines.names("step_retry")) == 2, "two attempts have failed")
    first.kill()
    second = await make_app(settings=MORTAL)
    await until_status(second, run, RunStatus.FAILED)
    await until(lambda: "run_failed" in lines.names(), "its end is told")
    attempts = [fields_of(record)["attempt"] for record in lines.of_runs if "attempt" in fields_of(record)]
    assert attempts == [1, 2, 3, 4]
    assert lines.names("retries_exhausted", "run_failed") == ["retries_exhausted", "run_failed"]


async def test_after_a_sigkill_the_worker_that_takes_over_repeats_no_line(
    shared_database: Database, make_app_on: MakeApp, tmp_path: Path
) -> None:
    file, url = tmp_path / "log", url_of(shared_database)
    caller = await make_app_on(on=shared_database, worker=False)
    async with program("logging_worker", url, file) as doomed:
        await doomed.hear("serving")
        run = await caller.start(logging_worker.order.options(id="A-17"))
        await doomed.hear("step_retry")
        await doomed.kill()
    async with program("logging_worker", url, file) as survivor:
        await survivor.hear("serving")
        await until_status(caller, run, RunStatus.FAILED)

        def told() -> list[dict[str, Any]]:
            return [json.loads(line) for line in file.read_text().splitlines()]

        await until(lambda: any(one["edda_line"] == "run_failed" for one in told()), "its end is told")
    of_steps = [(one["edda_line"], one["edda_attempt"]) for one in told() if "edda_attempt" in one]
    assert of_steps == [("step_retry", 1), ("step_retry", 2), ("retries_exhausted", 3)]
    names = [one["edda_line"] for one in told()]
    assert names.count("worker_started") == 2
    assert names.count("run_failed") == 1
    assert names.count("worker_dead") + names.count("worker_taken_over") >= 1, names


async def test_a_worker_tells_its_start_and_its_stop_without_the_password(lines: Lines, database: Database) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        pass

    url = url_of(database)
    app = EddaApp("shop", url, storage=database.storage(), workflows=[order])
    await app.initialize()
    await app.shutdown()
    told = [record for record in lines.records if record.name == "edda.worker"]
    assert [line_of(record) for record in told] == ["worker_started", "worker_stopped"]
    started = fields_of(told[0])
    assert (started["service"], started["workflows"]) == ("shop", "order")
    assert started["database"].split(":")[0] == url.split(":")[0]
    assert started["worker"] == fields_of(told[1])["worker"]


def test_a_database_url_is_told_without_its_password() -> None:
    assert SECRET not in show_url(f"postgresql://shop:{SECRET}@db.example/shop?password={SECRET}")
    assert "db.example" in show_url(f"postgresql://shop:{SECRET}@db.example/shop")


async def test_hostile_text_stays_on_its_line(lines: Lines, make_app: MakeApp) -> None:
    app = await make_app(settings=RESTLESS)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        raise ValueError("first\r\nsecond \x1b[31mred \u2028 \ud800 postgresql://shop:pa55word@db/x")

    name = "A\n2026-01-01 CRITICAL forged\x1b[2J"
    with pytest.raises(ValueError, match="first"):
        await app.run(order.options(id=name))
    await until(lambda: "run_failed" in lines.names(), "its end is told")
    (record,) = lines.of_runs
    texts = [record.getMessage(), *(value for value in fields_of(record).values() if isinstance(value, str))]
    for text in texts:
        assert len(text.splitlines()) == 1
        assert "\x1b" not in text
        text.encode()
    assert fields_of(record)["run"] == "A\\n2026-01-01 CRITICAL forged\\x1b[2J"
    assert "pa55word" not in record.getMessage()


async def test_a_line_that_is_not_wanted_costs_no_formatting(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("edda").setLevel(logging.CRITICAL)
    monkeypatch.setattr(log, "one_line", lambda text: pytest.fail("it was formatted"))
    log.write("run_failed", run="A-17", workflow="order", error="x")
    assert not lines.records


def test_the_documentation_has_every_line() -> None:
    page = (ROOT / "docs" / "how-to" / "logging-and-hooks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \| (\w+) \| ([^|]+) \|", page, re.MULTILINE)
    documented = {
        name: (logger, level.upper(), frozenset(re.findall(r"`(\w+)`", fields))) for name, logger, level, fields in rows
    }
    known = {
        name: (line.logger.name, logging.getLevelName(line.level), frozenset(f"edda_{one}" for one in line.fields))
        for name, line in log.LINES.items()
    }
    assert documented == known
