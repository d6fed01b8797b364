"""Writes docs/reference/control-api.md out of control/operations.py: `python -m tests.web.api_page`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import getsource
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, inspect

from edda.control import views
from edda.control.operations import MOST_ROWS, OPERATIONS, PREFIX, Operation
from edda.web.openapi import REFUSALS
from edda.web.sse import KEEPALIVE_SECONDS as KEEPALIVE
from edda.web.sse import MAX_SECONDS as LIFETIME
from edda.web.sse import MOST_STREAMS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "control-api.md"

INTRODUCTION = f"""# The control API

<!-- Written by `python -m tests.web.api_page` out of src/edda/control/operations.py. Do not edit. -->

Everything that the viewer and the command line show and do, as JSON over HTTP, below `{PREFIX}` of a served app.
`GET {PREFIX}/openapi.json` describes it for programs (OpenAPI 3.1).

```text
curl -H 'authorization: Bearer <token>' 'http://127.0.0.1:8001{PREFIX}/runs?status=failed&limit=5'
```

From Python the same is `RemoteController(url, token)` of `edda.control.remote`; each operation is a method of it.

## Who may

- With tokens ([how to give them](../how-to/serving.md)): `Authorization: Bearer <token>`, and the token needs the
  scope of the operation. A browser logs in with a token at `/_edda/login` and gets a cookie that is good for 12 hours,
  below `/_edda` only; it ends when its token is taken away.
- Without tokens: this machine only, under its own name, and everything.
- What changes something has to come with a token in the header, or from a page of this server itself: browsers say so
  with `Sec-Fetch-Site` or `Origin`.
- Every action is noted with the name of the token and the address that it came from: `GET {PREFIX}/audits`.

## Operations
"""
AFTER = f"""
What stands in braces is percent-encoded, and may be anything, also a slash (`%2F`). A list in a query is its name
several times: `status=failed&status=cancelled`. A body may be left out if nothing in it is required.

Lists come in pages of at most {MOST_ROWS}: `next` of an answer is the `cursor` to ask for the page behind it with;
`null` means that there is none. `searched_to` says how far back ids were searched for `q`, and inputs for `input`: ask
for what is older with it as `until`; `null` means that everything was.

`GET {PREFIX}/stream` is a stream of server-sent events for those who may look: `event: changed` whenever something has
changed, the first at once, at most one a second; a comment every {KEEPALIVE:.0f} seconds. It ends after {LIFETIME:.0f}
seconds, and when the app drains; browsers ask again by themselves. At most {MOST_STREAMS} are open at once.

`GET /_edda/metrics` is the text format of Prometheus (0.0.4), for those who may look; the database is asked every 5
seconds at most.

## Refusals

Every refusal is JSON as [that of the HTTP endpoint](http.md#all-answers): `error`, `error_type`, `retryable`, and
`attribute` where one field is the matter.

| Status | When |
|---|---|
"""


def write_page() -> str:
    refusals = "".join(f"| {status} | {words} |\n" for status, words in REFUSALS.items())
    return "".join((INTRODUCTION, *_operations(), AFTER, refusals, *_records()))


def _operations() -> Iterator[str]:
    yield "\n| Request | Method | Scope | Query | Body | Answer | |\n|---|---|---|---|---|---|---|\n"
    for one in OPERATIONS:
        kinds = (_link(kind) for kind in (one.query, one.body))
        cells = (f"`{one.method} {one.path}`", f"`{one.name}`", one.scope, *kinds, _answer(one), one.summary)
        yield f"| {' | '.join(cells)} |\n"


def _answer(one: Operation[Any]) -> str:
    return _say(inspect.type_info(one.answer))


def _link(kind: type | None) -> str:
    return "" if kind is None else f"`{kind.__name__}`"


def _records() -> Iterator[str]:
    asked = [kind for one in OPERATIONS for kind in (one.query, one.body) if kind is not None]
    given = [one.answer for one in OPERATIONS]
    yield "\n## What is asked for\n"
    yield from map(_record, _named(inspect.multi_type_info(asked)))
    yield "\n## What is given\n"
    yield from map(_record, _named(inspect.multi_type_info(given)))


def _named(kinds: Iterable[inspect.Type]) -> list[inspect.StructType]:
    """Every record in them, each once, in the order in which they are met."""
    found: dict[type, inspect.StructType] = {}
    rest = list(kinds)
    while rest:
        kind = rest.pop(0)
        if isinstance(kind, inspect.StructType) and kind.cls not in found:
            found[kind.cls] = kind
            rest += [field.type for field in kind.fields]
        rest += _within(kind)
    return [kind for kind in found.values() if _item(kind) is None]


def _within(kind: inspect.Type) -> list[inspect.Type]:
    match kind:
        case inspect.UnionType():
            return list(kind.types)
        case inspect.VarTupleType():
            return [kind.item_type]
        case inspect.DictType():
            return [kind.value_type]
        case _:
            return []


def _record(kind: inspect.StructType) -> str:
    words = _words().get(kind.cls.__name__, {})
    cells = ((f"`{one.name}`", _say(one.type), _default(one), words.get(one.name, "")) for one in kind.fields)
    rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return f"\n### {kind.cls.__name__}\n\n| Field | Type | Default | |\n|---|---|---|---|\n{rows}"


@cache
def _words() -> dict[str, dict[str, str]]:
    """What stands below a field in the code: by record and field."""
    classes = [node for node in ast.parse(getsource(views)).body if isinstance(node, ast.ClassDef)]
    return {one.name: dict(_described_fields(one)) for one in classes}


def _described_fields(record: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(record.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as words)):
                yield name, " ".join(words.split())


def _default(field: inspect.Field) -> str:
    if field.required:
        return ""
    if field.default is NODEFAULT:
        return "`{}`"
    return f"`{json.dumps(field.default)}`"


def _say(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _say_words(kind)
        case inspect.UnionType():
            return " or ".join(map(_say, kind.types))
        case inspect.VarTupleType():
            return f"list of {_say(kind.item_type)}"
        case inspect.DictType():
            return "object" if isinstance(kind.value_type, inspect.AnyType) else f"object of {_say(kind.value_type)}"
        case inspect.StructType():
            return f"`{kind.cls.__name__}`" if (item := _item(kind)) is None else f"page of {_say(item)}"
        case inspect.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case _:
            return _PLAIN[type(kind)]


def _say_words(kind: inspect.Metadata) -> str:
    words = (kind.extra_json_schema or {}).get("enum")
    return _say(kind.type) if words is None else ", ".join(f"`{word}`" for word in words)


def _item(kind: inspect.StructType) -> inspect.Type | None:
    """Of a page; other records are none."""
    items = next((field.type for field in kind.fields if field.name == "items"), None)
    return items.item_type if isinstance(items, inspect.VarTupleType) else None


_PLAIN: dict[type, str] = {
    inspect.AnyType: "any JSON",
    inspect.NoneType: "null",
    inspect.StrType: "text",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "true or false",
    inspect.DateTimeType: "moment (RFC 3339)",
}


if __name__ == "__main__":
    PAGE.write_text(write_page())
