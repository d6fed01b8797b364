"""A release changes the type of a value that is recorded: the run goes on if the value fits, and is parked if not."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from typing import Annotated, Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field, create_model

from edda import EddaApp, RunStatus, WorkflowContext, activity, compensation, on_failure, wait_event, workflow
from edda.engine.settings import Settings
from edda.errors import NonDeterminismError
from edda.workflow.workflow import Workflow, registry
from tests.conftest import Database, MakeDatabase

from .conditions import reason_of, until_status
from .conftest import MakeApp

PATIENT = Settings(linger=0.0, sweep=0.1, takeover_grace=0.0, poll=0.1, parked_first=3600.0, parked_most=7200.0)
"""Only a new worker tries a parked run."""


@pytest.fixture(params=("memory", "sqlite"))
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


class Releases:
    """The same database under one release after the other."""

    def __init__(self, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
        self._make_app, self._monkeypatch = make_app, monkeypatch
        self._app: EddaApp | None = None

    async def deploy(self, make: Callable[[], Workflow[..., Any]]) -> tuple[EddaApp, Workflow[..., Any]]:
        if self._app is not None:
            await self._app.shutdown()
        self._monkeypatch.setattr(registry, "_workflows", {})
        flow = make()
        self._app = await self._make_app(settings=PATIENT)
        return self._app, flow


@pytest.fixture
def releases(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> Releases:
    return Releases(make_app, monkeypatch)


# The types, and how they change

REQUIRED: Any = object()
Fields = dict[str, tuple[Any, Any]]
"""Name, type and default."""


def as_dataclass(name: str, fields: Fields) -> Any:
    return make_dataclass(name, [(n, t) if d is REQUIRED else (n, t, field(default=d)) for n, (t, d) in fields.items()])


def as_pydantic(name: str, fields: Fields) -> Any:
    return create_model(name, **{n: (t, ... if d is REQUIRED else d) for n, (t, d) in fields.items()})  # type: ignore[call-overload]


def as_struct(name: str, fields: Fields) -> Any:
    return msgspec.defstruct(name, [(n, t) if d is REQUIRED else (n, t, d) for n, (t, d) in fields.items()])


def as_named_tuple(name: str, fields: Fields) -> Any:
    make: Any = namedtuple  # the type checker wants to see the fields
    cls = make(name, list(fields), defaults=[default for _, default in fields.values() if default is not REQUIRED])
    cls.__annotations__ = {name: annotation for name, (annotation, _) in fields.items()}
    return cls


class Known(TypedDict):
    x: int


class More(TypedDict):
    x: int
    y: int


KINDS: dict[str, Callable[[str, Fields], Any]] = {
    "dataclass": as_dataclass,
    "pydantic": as_pydantic,
    "struct": as_struct,
    "named tuple": as_named_tuple,
}
OLD: Fields = {"x": (int, REQUIRED), "z": (int, 3)}
FITTING: dict[str, tuple[str, Fields]] = {
    "field with a default added": ("R", {**OLD, "y": (int, 7)}),
    "field removed": ("R", {"x": (int, REQUIRED)}),
    "class renamed": ("Other", OLD),
    "type widened": ("R", {"x": (int | str, REQUIRED), "z": (int, 3)}),
}
UNFITTING: dict[str, tuple[str, Fields, str]] = {
    "field added": ("R", {"x": (int, REQUIRED), "y": (int, REQUIRED), "z": (int, 3)}, "y"),
    "type changed": ("R", {"x": (list[int], REQUIRED), "z": (int, 3)}, "x"),
}


class Red(Enum):
    RED = "red"
    BLUE = "blue"


class OnlyBlue(Enum):
    BLUE = "blue"


# Where the values are recorded


@dataclass
class Value:
    type: Any
    make: Callable[[], Any]
    read: Callable[[Any], Any]


def result(value: Value, log: list[str]) -> Workflow[..., Any]:
    @compensation
    async def undo(ctx: WorkflowContext) -> None:
        log.append("undone")

    async def work(ctx: WorkflowContext) -> Any:
        log.append("done")
        return value.make()

    work.__annotations__["return"] = value.type
    step = activity(on_failure(undo)(work))

    @workflow(name="flow")
    async def flow(ctx: WorkflowContext) -> Any:
        got = await step(ctx)
        await wait_event(ctx, "go")
        return value.read(got)

    return flow


def inline(value: Value, log: list[str]) -> Workflow[..., Any]:
    async def work() -> Any:
        return value.make()

    work.__annotations__["return"] = value.type

    @workflow(name="flow")
    async def flow(ctx: WorkflowContext) -> Any:
        got = await ctx.step("work", work)
        await wait_event(ctx, "go")
        return value.read(got)

    return flow


def argument(value: Value, log: list[str]) -> Workflow[..., Any]:
    async def flow(ctx: WorkflowContext, got: Any) -> Any:
        await wait_event(ctx, "go")
        return value.read(got)

    flow.__annotations__["got"] = value.type
    return workflow(name="flow")(flow)


def child(value: Value, log: list[str]) -> Workflow[..., Any]:
    async def part(ctx: WorkflowContext) -> Any:
        return value.make()

    part.__annotations__["return"] = value.type
    parts = workflow(name="part")(part)

    @workflow(name="flow")
    async def flow(ctx: WorkflowContext) -> Any:
        got = await parts.run()
        await wait_event(ctx, "go")
        return value.read(got)

    return flow


def compensated(value: Value, log: list[str]) -> Workflow[..., Any]:
    """The undo gets the recorded result; nobody else looks at it."""

    async def undo(ctx: WorkflowContext, result: Any) -> None:
        log.append(f"undone {value.read(result)}")

    undo.__annotations__["result"] = value.type

    async def work(ctx: WorkflowContext) -> Any:
        return value.make()

    work.__annotations__["return"] = value.type
    step = activity(on_failure(compensation(undo))(work))

    @workflow(name="flow")
    async def flow(ctx: WorkflowContext) -> Any:
        await step(ctx)
        await wait_event(ctx, "go")
        raise ValueError("as planned")

    return flow


PLACES: dict[str, Callable[[Value, list[str]], Workflow[..., Any]]] = {
    "result": result,
    "inline": inline,
    "argument": argument,
    "child": child,
}
ONE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda cls: cls, lambda one: one, lambda got: got),
    "in a list": (lambda cls: list.__class_getitem__(cls), lambda one: [one], lambda got: got[0]),
    "in a dict, or None": (
        lambda cls: dict.__class_getitem__((str, cls)) | None,
        lambda one: {"a": one},
        lambda got: got["a"],
    ),
}

PLACED = (
    ("result", "itself"),
    ("result", "in a list"),
    ("inline", "in a list"),
    ("argument", "in a dict, or None"),
    ("child", "itself"),
)


def value_of(kind: str, nesting: str, name: str, fields: Fields) -> Value:
    cls = KINDS[kind](name, fields)
    annotation, wrap, unwrap = ONE[nesting]
    return Value(annotation(cls), lambda: wrap(cls(x=1)), lambda got: f"{type(unwrap(got)).__name__} {unwrap(got).x}")


async def begin(releases: Releases, make: Callable[[], Workflow[..., Any]], *args: Any) -> None:
    app, flow = await releases.deploy(make)
    await app.start(flow.options(id="run"), *args)
    await until_status(app, "run", RunStatus.WAITING_FOR_EVENT)


async def go_on(app: EddaApp) -> Any:
    await app.send_event("go", "/test", {})
    return await app.handle("run").result(timeout=30)


async def parks_then_goes_on(releases: Releases, old: Value, new: Value, place: str, said: str) -> None:
    log: list[str] = []
    await begin(releases, lambda: PLACES[place](old, log), *([old.make()] if place == "argument" else []))
    before = list(log)
    app, _ = await releases.deploy(lambda: PLACES[place](new, log))
    await app.send_event("go", "/test", {})
    await until_status(app, "run", RunStatus.PARKED)
    reason = await reason_of(app, "run")
    assert reason.startswith(NonDeterminismError.__name__)
    for word in (
        said,
        "default",
        {"result": "'work:1'", "inline": "'work:1'", "child": "'part:1'", "argument": "'got'"}[place],
    ):
        assert word in reason
    assert log == before, "nothing is undone, and nothing done again"
    app, _ = await releases.deploy(lambda: PLACES[place](old, log))
    assert await app.handle("run").result(timeout=30) == old.read(old.make())
    assert log == before


@pytest.mark.parametrize(("place", "nesting"), PLACED)
@pytest.mark.parametrize("change", FITTING)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_change_that_fits_lets_the_run_go_on(
    releases: Releases, kind: str, change: str, place: str, nesting: str
) -> None:
    log: list[str] = []
    name, fields = FITTING[change]
    old, new = value_of(kind, nesting, "R", OLD), value_of(kind, nesting, name, fields)
    await begin(releases, lambda: PLACES[place](old, log), *([old.make()] if place == "argument" else []))
    app, _ = await releases.deploy(lambda: PLACES[place](new, log))
    assert await go_on(app) == f"{name} 1"


@pytest.mark.parametrize(("place", "nesting"), PLACED)
@pytest.mark.parametrize("change", UNFITTING)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_change_that_does_not_fit_parks_the_run_until_the_code_fits(
    releases: Releases, kind: str, change: str, place: str, nesting: str
) -> None:
    name, fields, said = UNFITTING[change]
    old, new = value_of(kind, nesting, "R", OLD), value_of(kind, nesting, name, fields)
    await parks_then_goes_on(releases, old, new, place, said)


OTHERS: dict[str, tuple[Value, Value, str]] = {
    "enum member removed": (
        Value(Red, lambda: Red.RED, lambda got: got.name),
        Value(OnlyBlue, lambda: OnlyBlue.BLUE, lambda got: got.name),
        "OnlyBlue",
    ),
    "enum member in a list removed": (
        Value(list[Red], lambda: [Red.BLUE, Red.RED], lambda got: got[1].name),
        Value(list[OnlyBlue], lambda: [OnlyBlue.BLUE], lambda got: got[0].name),
        "[1]",
    ),
    "typed dict with another key": (
        Value(Known, lambda: {"x": 1}, lambda got: got["x"]),
        Value(
            More,
            lambda: {"x": 1, "y": 1},
            lambda got: got["y"],
        ),
        "y",
    ),
    "another plain type": (
        Value(int, lambda: 1, lambda got: got + 1),
        Value(str, lambda: "1", lambda got: got.upper()),
        "expected str, got int",
    ),
    "another container": (
        Value(list[int], lambda: [1], lambda got: got[0]),
        Value(dict[str, int], lambda: {"a": 1}, lambda got: got["a"]),
        "dict of str to int",
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", OTHERS)
async def test_other_changes_that_do_not_fit(releases: Releases, change: str, place: str) -> None:
    old, new, said = OTHERS[change]
    await parks_then_goes_on(releases, old, new, place, said)


async def test_an_undo_waits_for_code_that_can_read_the_result(releases: Releases) -> None:
    log: list[str] = []
    old = value_of("dataclass", "itself", "R", OLD)
    new = value_of("dataclass", "itself", "R", UNFITTING["field added"][1])
    await begin(releases, lambda: compensated(old, log))
    app, _ = await releases.deploy(lambda: compensated(new, log))
    await app.send_event("go", "/test", {})
    await until_status(app, "run", RunStatus.PARKED)
    assert log == []
    app, _ = await releases.deploy(lambda: compensated(old, log))
    with pytest.raises(ValueError, match="as planned"):
        await app.handle("run").result(timeout=30)
    assert log == ["undone R 1"]


# Annotations that never were true


class Wrong(BaseModel):
    x: int


FALSE: dict[str, tuple[Any, Any]] = {
    "None for a number": (int, None),
    "None for a model": (Wrong, None),
    "a dict that is no model": (Wrong, {"y": 1}),
    "text for a number": (int, "1"),
    "a list with something else": (list[int], [1, "2"]),
    "text that is no member": (Red, "green"),
    "a dataclass with another value": (as_dataclass("R", OLD), as_dataclass("R", OLD)(x="one")),
}


@pytest.mark.parametrize("place", ["result", "inline", "child"])
@pytest.mark.parametrize("case", FALSE)
async def test_an_annotation_that_was_never_true_parks_nothing(releases: Releases, case: str, place: str) -> None:
    """The code gets the same value at every replay as at first: what is recorded."""
    annotation, given = FALSE[case]
    log: list[str] = []
    value = Value(annotation, lambda: given, repr)
    await begin(releases, lambda: PLACES[place](value, log))
    app, _ = await releases.deploy(lambda: PLACES[place](value, log))
    shown = await go_on(app)
    assert shown == ("{'x': 'one', 'z': 3}" if case == "a dataclass with another value" else repr(given))


class Strange:
    pass


async def test_a_result_whose_annotation_cannot_be_read_is_recorded(releases: Releases) -> None:
    log: list[str] = []

    def work() -> int:
        log.append("done")
        return 1

    broken, mended = (Value(annotation, work, repr) for annotation in (Annotated[Strange, Field(gt=0)], int))
    app, flow = await releases.deploy(lambda: inline(broken, log))
    await app.start(flow.options(id="run"))
    await until_status(app, "run", RunStatus.PARKED)
    app, _ = await releases.deploy(lambda: inline(mended, log))
    assert await go_on(app) == "1"
    assert log == ["done"]


def with_false_defaults(annotation: Any) -> Callable[[], Workflow[..., Any]]:
    def make() -> Workflow[..., Any]:
        async def flow(ctx: WorkflowContext, order: Any = None, *, count: int = None) -> Any:  # type: ignore[assignment]  # noqa: RUF013
            await wait_event(ctx, "go")
            return [order, count]

        flow.__annotations__["order"] = annotation
        return workflow(name="flow")(flow)

    return make


async def test_a_default_that_is_not_of_its_type_parks_nothing(releases: Releases) -> None:
    await begin(releases, with_false_defaults(Wrong))
    app, _ = await releases.deploy(with_false_defaults(Wrong))
    assert await go_on(app) == [None, None]


async def test_an_annotation_that_is_corrected_changes_no_id(releases: Releases) -> None:
    """A start under the same id is the same start, though the default is what its annotation says by now."""
    await begin(releases, with_false_defaults(Wrong))
    app, flow = await releases.deploy(with_false_defaults(Wrong | None))
    assert await app.start(flow.options(id="run")) == "run"
    assert await go_on(app) == [None, None]


# Events


def waiting(model: Any) -> Callable[[], Workflow[..., Any]]:
    def make() -> Workflow[..., Any]:
        @workflow(name="flow")
        async def flow(ctx: WorkflowContext) -> Any:
            got = (await wait_event(ctx, "first", model=model)).data
            await wait_event(ctx, "go")
            return got.x

        return flow

    return make


async def test_an_event_that_no_longer_fits_its_model_parks_the_run(releases: Releases) -> None:
    old, new = (as_pydantic("R", fields) for fields in (OLD, UNFITTING["field added"][1]))
    app, flow = await releases.deploy(waiting(old))
    await app.start(flow.options(id="run"))
    await until_status(app, "run", RunStatus.WAITING_FOR_EVENT)
    await app.send_event("first", "/test", {"x": 1})
    app, _ = await releases.deploy(waiting(old))
    await until_status(app, "run", RunStatus.WAITING_FOR_EVENT)
    app, _ = await releases.deploy(waiting(new))
    await app.send_event("go", "/test", {})
    await until_status(app, "run", RunStatus.PARKED)
    assert "'first:1'" in await reason_of(app, "run")
    app, _ = await releases.deploy(waiting(old))
    assert await app.handle("run").result(timeout=30) == 1
