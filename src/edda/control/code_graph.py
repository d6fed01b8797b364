"""The structure of a workflow's code: a tree of `Node` in the order of the code.

`read_structure` parses the source; it executes nothing. Nodes have the names of the history, so that `match_steps`
finds the steps of a run in the code. `describe_workflow` is what a worker stores of a workflow.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from edda.core.validation import input_schema
from edda.core.value_path import truncate
from edda.workflow import channels, events, saga, send_event, waits
from edda.workflow.activity import Activity
from edda.workflow.saga import ActivityCompensation
from edda.workflow.workflow import Workflow


class NodeKind(StrEnum):
    # Recorded in the history
    STEP = "step"
    TIMER = "timer"
    EVENT = "event"
    MESSAGE = "message"
    CHILD = "child"
    UNDO = "undo"
    """A compensation: a child of its step, or a node where `register_compensation` is called."""

    # With children
    BRANCH = "branch"
    """Its children are arms, of which at most one runs."""
    LOOP = "loop"
    TRY = "try"
    """Its children are arms: the body, the handlers, then `finally`."""
    PARALLEL = "parallel"
    """Its children are arms that run concurrently."""
    RACE = "race"
    """`wait_any`: as PARALLEL, until the first arm ends."""
    BLOCK = "block"
    """The body of a `with`."""
    CALL = "call"
    """A call of a function that takes the workflow context."""
    ARM = "arm"

    # Leave the block
    RETURN = "return"
    RAISE = "raise"
    BREAK = "break"
    CONTINUE = "continue"
    RECUR = "recur"


class Node(Struct, frozen=True, omit_defaults=True):
    kind: NodeKind
    line: int
    name: str = ""
    """The name in the history; empty if it is computed at run time."""
    text: str = ""
    """Source to show: a condition, an iterable, a returned value."""
    children: tuple[Node, ...] = ()
    id: str = ""
    """Its path in the tree, such as `2.0.1`."""
    step: str = ""
    """The id of the step, if the code passes one as a literal."""


class Structure(Struct, frozen=True):
    name: str
    file: str
    line: int
    nodes: tuple[Node, ...]


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """All nodes, in the order of the code."""
    for node in nodes:
        yield node
        yield from walk(node.children)


MAX_TEXT_LENGTH = 80
MAX_CALL_DEPTH = 4
"""Nested calls of functions that take the context are followed this far."""


def read_structure(workflow: Workflow[Any, Any] | Callable[..., Any]) -> Structure | None:
    """None if there is no source: a lambda, or code that was typed into an interpreter."""
    fn = inspect.unwrap(workflow.fn if isinstance(workflow, Workflow) else workflow)
    if not isinstance(fn, FunctionType):
        return None
    definition = _parse(fn)
    if definition is None:
        return None
    nodes = _SourceReader(fn, definition).read()
    name = workflow.name if isinstance(workflow, Workflow) else fn.__name__
    return Structure(name, fn.__code__.co_filename, definition.lineno, _number(nodes, ""))


Definition = ast.AsyncFunctionDef | ast.FunctionDef


def _parse(fn: FunctionType) -> Definition | None:
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, Definition) or definition.name != fn.__code__.co_name:
        return None  # a lambda: the lines are those of the statement around it
    ast.increment_lineno(tree, max(first, 1) - 1)
    return definition


def _number(nodes: Sequence[Node], prefix: str) -> tuple[Node, ...]:
    ids = [f"{prefix}{place}" for place in range(len(nodes))]
    return tuple(
        msgspec.structs.replace(node, id=id, children=_number(node.children, f"{id}."))
        for id, node in zip(ids, nodes, strict=True)
    )


_UNKNOWN = object()

_STEPS: dict[Any, str] = {
    channels.publish: "publish",
    channels.send_to: "send_to",
    channels.subscribe: "subscribe",
    send_event.send_event: "send_event",
    send_event.send_event_transactional: "send_event_transactional",
}
_TIMERS: dict[Any, str] = {
    waits.sleep: "sleep",
    waits.sleep_until: "sleep_until",
    asyncio.sleep: "timer",
}
_TIMEOUTS = (asyncio.timeout, asyncio.timeout_at)
_CONCURRENT = (asyncio.gather, asyncio.wait, asyncio.as_completed)


class _SourceReader:
    """Reads one function. Only statements and expressions that record something or contain such become nodes."""

    def __init__(self, fn: FunctionType, definition: Definition, stack: tuple[str, ...] = ()) -> None:
        self._fn = fn
        self._body = definition.body
        self._stack = (*stack, definition.name)
        parameters = [*definition.args.posonlyargs, *definition.args.args]
        self._ctx = parameters[0].arg if parameters else ""
        inside = [one for statement in definition.body for one in ast.walk(statement)]
        self._inner = {one.name: one for one in inside if isinstance(one, Definition)}
        """Functions that are defined in it."""
        self._known = {**fn.__globals__, **_closure_of(fn)}
        stored = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        self._local = {parameter.arg for parameter in parameters} | stored | set(self._inner)
        """Names that are assigned at run time."""

    def read(self) -> tuple[Node, ...]:
        return self._block(self._body)

    # Statements

    def _block(self, statements: Sequence[ast.stmt]) -> tuple[Node, ...]:
        return tuple(node for statement in statements for node in self._statement(statement))

    def _statement(self, statement: ast.stmt) -> tuple[Node, ...]:
        match statement:
            case ast.If():
                return (*self._expression(statement.test), *self._branch(statement))
            case ast.Match():
                return (*self._expression(statement.subject), *self._match(statement))
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement)
            case ast.With() | ast.AsyncWith():
                return self._with(statement)
            case ast.Return():
                return (*self._expression(statement.value), self._leaf(NodeKind.RETURN, statement, statement.value))
            case ast.Raise():
                return (*self._expression(statement.exc), self._leaf(NodeKind.RAISE, statement, statement.exc))
            case ast.Break() | ast.Continue():
                is_break = isinstance(statement, ast.Break)
                return (Node(NodeKind.BREAK if is_break else NodeKind.CONTINUE, statement.lineno),)
            case ast.Try() | ast.TryStar():
                return self._try(statement)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return ()
        return self._expression(statement)

    def _leaf(self, kind: NodeKind, statement: ast.stmt, value: ast.expr | None) -> Node:
        return Node(kind, statement.lineno, text="" if value is None else _show(value))

    def _branch(self, statement: ast.If) -> tuple[Node, ...]:
        arms = [self._arm(statement.body, statement.test.lineno, _show(statement.test))]
        rest = statement.orelse
        while len(rest) == 1 and isinstance(rest[0], ast.If) and not self._expression(rest[0].test):
            arms.append(self._arm(rest[0].body, rest[0].lineno, _show(rest[0].test)))
            rest = rest[0].orelse
        arms.append(self._arm(rest, rest[0].lineno if rest else statement.lineno, "else"))
        return _unless_empty(Node(NodeKind.BRANCH, statement.lineno, text=_show(statement.test), children=tuple(arms)))

    def _match(self, statement: ast.Match) -> tuple[Node, ...]:
        arms = []
        for case in statement.cases:
            guard = "" if case.guard is None else f" if {ast.unparse(case.guard)}"
            text = _shorten(f"case {ast.unparse(case.pattern)}{guard}")
            arms.append(self._arm(case.body, case.pattern.lineno, text))
        last = statement.cases[-1]
        if last.guard is not None or not (isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None):
            arms.append(Node(NodeKind.ARM, statement.lineno, text="else"))
        text = f"match {_show(statement.subject)}"
        return _unless_empty(Node(NodeKind.BRANCH, statement.lineno, text=text, children=tuple(arms)))

    def _loop(self, statement: ast.For | ast.AsyncFor | ast.While) -> tuple[Node, ...]:
        body = self._block(statement.body)
        if isinstance(statement, ast.While):
            before: tuple[Node, ...] = ()
            body = (*self._expression(statement.test), *body)
            text = f"while {_show(statement.test)}"
        else:
            before = self._expression(statement.iter)
            text = _shorten(f"for {ast.unparse(statement.target)} in {ast.unparse(statement.iter)}")
        loop = _unless_empty(Node(NodeKind.LOOP, statement.lineno, text=text, children=body))
        return (*before, *loop, *self._block(statement.orelse))

    def _try(self, statement: ast.Try | ast.TryStar) -> tuple[Node, ...]:
        arms = [self._arm([*statement.body, *statement.orelse], statement.lineno, "try")]
        for handler in statement.handlers:
            text = "except" if handler.type is None else f"except {_show(handler.type)}"
            arms.append(self._arm(handler.body, handler.lineno, text))
        if statement.finalbody:
            arms.append(self._arm(statement.finalbody, statement.finalbody[0].lineno, "finally"))
        return _unless_empty(Node(NodeKind.TRY, statement.lineno, text="try", children=tuple(arms)))

    def _with(self, statement: ast.With | ast.AsyncWith) -> tuple[Node, ...]:
        managers = [item.context_expr for item in statement.items]
        targets = [self._resolve(one.func) if isinstance(one, ast.Call) else _UNKNOWN for one in managers]
        before = tuple(node for manager in managers for node in self._expression(manager))
        text = _shorten(", ".join(ast.unparse(manager) for manager in managers))
        if asyncio.TaskGroup in targets:
            arms = tuple(self._arm([one], one.lineno, "") for one in statement.body)
            group = Node(NodeKind.PARALLEL, statement.lineno, text=text, children=_without_empty(arms))
            return (*before, *_unless_empty(group))
        body = self._block(statement.body)
        if any(target in _TIMEOUTS for target in targets if isinstance(target, FunctionType)):
            return (*before, Node(NodeKind.BLOCK, statement.lineno, name="timer", text=text, children=body))
        return (*before, Node(NodeKind.BLOCK, statement.lineno, text=text, children=body)) if body else before

    def _arm(self, statements: Sequence[ast.stmt], line: int, text: str) -> Node:
        return Node(NodeKind.ARM, line, text=text, children=self._block(statements))

    # Expressions

    def _expression(self, expression: ast.AST | None) -> tuple[Node, ...]:
        """In the order of evaluation."""
        match expression:
            case None | ast.Lambda():
                return ()
            case ast.Call():
                return self._call(expression)
            case ast.IfExp():
                return (*self._expression(expression.test), *self._choice(expression))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._comprehension(expression, [expression.elt])
            case ast.DictComp():
                return self._comprehension(expression, [expression.key, expression.value])
        return tuple(node for child in ast.iter_child_nodes(expression) for node in self._expression(child))

    def _choice(self, choice: ast.IfExp) -> tuple[Node, ...]:
        text = _show(choice.test)
        arms = tuple(
            Node(NodeKind.ARM, value.lineno, text=name, children=self._expression(value))
            for name, value in ((text, choice.body), ("else", choice.orelse))
        )
        return _unless_empty(Node(NodeKind.BRANCH, choice.lineno, text=text, children=arms))

    def _comprehension(self, comprehension: Any, results: Sequence[ast.expr]) -> tuple[Node, ...]:
        first = comprehension.generators[0]
        conditions = [condition for one in comprehension.generators for condition in one.ifs]
        inside = [one.iter for one in comprehension.generators[1:]]
        body = tuple(node for part in (*inside, *conditions, *results) for node in self._expression(part))
        text = _shorten(f"for {ast.unparse(first.target)} in {ast.unparse(first.iter)}")
        loop = Node(NodeKind.LOOP, comprehension.lineno, text=text, children=body)
        return (*self._expression(first.iter), *_unless_empty(loop))

    # Calls

    def _call(self, call: ast.Call) -> tuple[Node, ...]:
        target = self._resolve(call.func)
        if target is waits.wait_any:
            return self._concurrent(call, NodeKind.RACE)
        if any(target is one for one in _CONCURRENT):
            return self._concurrent(call, NodeKind.PARALLEL)
        before = tuple(node for part in (call.func, *_arguments(call)) for node in self._expression(part))
        return (*before, *self._durable(call, target))

    def _concurrent(self, call: ast.Call, kind: NodeKind) -> tuple[Node, ...]:
        named = [("", value) for value in call.args] + [(one.arg or "", one.value) for one in call.keywords]
        arms = _without_empty(
            Node(NodeKind.ARM, value.lineno, text=name, children=self._expression(value)) for name, value in named
        )
        return _unless_empty(Node(kind, call.lineno, text=_show(call.func), children=arms))

    def _durable(self, call: ast.Call, target: Any) -> tuple[Node, ...]:
        """The node of the call itself, if it records something."""
        if isinstance(target, Activity):
            return (self._step(call, target, self._text_of(_given(call, None, "activity_id"))),)
        node = self._verb(call, target) or self._method(call)
        return self._follow(call, target) if node is None else (node,)

    def _step(self, call: ast.Call, activity: Activity[Any, Any], id: str) -> Node:
        undo_with = activity.undo
        undo = (
            (Node(NodeKind.UNDO, call.lineno, undo_with._undo.name),)
            if isinstance(undo_with, ActivityCompensation)
            else ()
        )
        return Node(NodeKind.STEP, call.lineno, activity.name, step=id, children=undo)

    def _verb(self, call: ast.Call, target: Any) -> Node | None:
        line = call.lineno
        if not isinstance(target, FunctionType):
            return None
        if target in _STEPS:
            about = _given(call, 0 if target is send_event.send_event else 1)
            return Node(NodeKind.STEP, line, _STEPS[target], self._text_of(about))
        if target in _TIMERS:
            duration = _given(
                call, 0 if target is asyncio.sleep else 1, "seconds", "duration_seconds", "target_time", "until"
            )
            return Node(NodeKind.TIMER, line, _TIMERS[target], "" if duration is None else _show(duration))
        if target is asyncio.wait_for:
            return Node(NodeKind.TIMER, line, "timer", _show(call))
        if target is events.wait_event:
            return self._wait(call, NodeKind.EVENT, _given(call, 1, "event_type"), _given(call, 4, "event_id"))
        if target is channels.receive:
            return self._wait(call, NodeKind.MESSAGE, _given(call, 1, "channel"), _given(call, 3, "message_id"))
        if target is saga.register_compensation:
            return Node(NodeKind.UNDO, line, self._undo_name(_given(call, 1, "undo")))
        return None

    def _wait(self, call: ast.Call, kind: NodeKind, wanted: ast.expr | None, id: ast.expr | None) -> Node:
        name = self._text_of(wanted)
        text = "" if name or wanted is None else _show(wanted)
        return Node(kind, call.lineno, name, text, step=self._text_of(id))

    def _method(self, call: ast.Call) -> Node | None:
        """`ctx.step`, `ctx.recur`, `order.run`, `order.options(...).start`, `charge.with_id(...)`."""
        match call.func:
            case ast.Attribute(value=ast.Name(id=self._ctx), attr="step"):
                name = self._text_of(_given(call, 0))
                return Node(NodeKind.STEP, call.lineno, name, "" if name else _show(call))
            case ast.Attribute(value=ast.Name(id=self._ctx), attr="recur"):
                return Node(NodeKind.RECUR, call.lineno, text=_shorten(", ".join(map(ast.unparse, _arguments(call)))))
            case ast.Attribute(value=owner, attr="run" | "start" as verb):
                workflow = self._resolve(_before(owner, "options"))
                return (
                    Node(NodeKind.CHILD, call.lineno, workflow.name, verb) if isinstance(workflow, Workflow) else None
                )
            case ast.Attribute(value=ast.Call(func=ast.Attribute(value=owner, attr="handle")), attr="result"):
                known = isinstance(self._resolve(owner), Workflow)
                return Node(NodeKind.CHILD, call.lineno, "result", _show(owner)) if known else None
            case ast.Call(func=ast.Attribute(value=owner, attr="with_id")):
                activity = self._resolve(owner)
                id = self._text_of(_given(call.func, 0))
                return self._step(call, activity, id) if isinstance(activity, Activity) else None
        return None

    def _follow(self, call: ast.Call, target: Any) -> tuple[Node, ...]:
        """Reads a called function of the same module that gets the context."""
        if not any(isinstance(argument, ast.Name) and argument.id == self._ctx for argument in _arguments(call)):
            return ()
        reader = self._reader_of(call.func, target)
        if reader is None:
            return ()
        return _unless_empty(Node(NodeKind.CALL, call.lineno, reader._stack[-1], children=reader.read()))

    def _reader_of(self, func: ast.expr, target: Any) -> _SourceReader | None:
        if isinstance(func, ast.Name) and func.id in self._inner:
            fn, definition = self._fn, self._inner[func.id]
        elif isinstance(target, FunctionType) and target.__module__ == self._fn.__module__:
            fn, parsed = target, _parse(target)
            if parsed is None:
                return None
            definition = parsed
        else:
            return None
        if definition.name in self._stack or len(self._stack) > MAX_CALL_DEPTH:
            return None
        reader = _SourceReader(fn, definition, self._stack)
        reader._inner = {**self._inner, **reader._inner} if fn is self._fn else reader._inner
        return reader

    # Values that are known without running the code

    def _resolve(self, expression: ast.expr) -> Any:
        match expression:
            case ast.Name(id=name) if name not in self._local:
                return self._known.get(name, _UNKNOWN)
            case ast.Attribute(value=value, attr=name):
                owner = self._resolve(value)
                # An attribute of another object may be a property, which would run code.
                return vars(owner).get(name, _UNKNOWN) if isinstance(owner, ModuleType | type) else _UNKNOWN
        return _UNKNOWN

    def _text_of(self, expression: ast.expr | None) -> str:
        if expression is None:
            return ""
        value = expression.value if isinstance(expression, ast.Constant) else self._resolve(expression)
        return str(value) if isinstance(value, str) else ""

    def _undo_name(self, expression: ast.expr | None) -> str:
        if expression is None:
            return ""
        undo = self._resolve(expression)
        if isinstance(undo, Activity):
            return undo.name
        if isinstance(undo, FunctionType):
            return undo.__name__
        return expression.id if isinstance(expression, ast.Name) and expression.id in self._inner else ""


def _closure_of(fn: FunctionType) -> dict[str, Any]:
    known = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return known


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _given(call: ast.Call, place: int | None, *names: str) -> ast.expr | None:
    """The argument at a position, or with one of the names."""
    if place is not None and len(call.args) > place:
        return call.args[place]
    return next((keyword.value for keyword in call.keywords if keyword.arg in names), None)


def _before(expression: ast.expr, method: str) -> ast.expr:
    """`order` for `order.options(...)`; another expression is returned unchanged."""
    match expression:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name == method:
            return owner
    return expression


def _unless_empty(node: Node) -> tuple[Node, ...]:
    """No node, if all its descendants are empty arms."""
    has_any = any(child.kind is not NodeKind.ARM for child in walk(node.children))
    return (node,) if has_any else ()


def _without_empty(arms: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(arm for arm in arms if arm.children)


def _show(expression: ast.expr) -> str:
    return _shorten(ast.unparse(expression))


def _shorten(text: str) -> str:
    return truncate(text, MAX_TEXT_LENGTH)


logger = logging.getLogger(__name__)


def describe_workflow(workflow: Workflow[Any, Any]) -> bytes:
    """`schema` or `structure` is null if it cannot be derived."""
    return msgspec.json.encode(
        {
            "schema": _try(workflow, lambda one: input_schema(one.signature)),
            "structure": _try(workflow, _structure_of),
            "documentation": (inspect.getdoc(workflow.fn) or "").partition("\n\n")[0].strip(),
        }
    )


_structures: WeakKeyDictionary[Callable[..., Any], Structure | None] = WeakKeyDictionary()
"""Parsed structures by workflow function."""


def read_structures(workflows: Iterable[Workflow[Any, Any]]) -> None:
    """For processes whose event loop runs in another thread: call it on the main thread before that thread starts."""
    for workflow in workflows:
        _try(workflow, _structure_of)


def _structure_of(workflow: Workflow[Any, Any]) -> Structure | None:
    """Parses on the main thread only: up to CPython 3.11, `ast.parse` in two threads at once raises SystemError in
    both, and the user's code may parse too."""
    if workflow.fn not in _structures:
        if threading.current_thread() is not threading.main_thread():
            return None
        _structures[workflow.fn] = read_structure(workflow.fn)
    return _structures[workflow.fn]


def _try(workflow: Workflow[Any, Any], describe: Callable[[Workflow[Any, Any]], Any]) -> Any:
    try:
        return describe(workflow)
    except Exception:  # annotations and defaults of the user may raise anything when they are inspected
        logger.debug("workflow %s: its input schema or structure is not shown", workflow.name, exc_info=True)
        return None
