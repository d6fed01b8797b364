"""Writes docs/reference/control-api.md from control/controller.py: `python -m tests.web.api_page`."""

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
from edda.control.controller import OPERATIONS, PREFIX, Operation
from edda.control.views import MAX_PAGE_SIZE
from edda.web.openapi import ERRORS
from edda.web.sse import KEEPALIVE_SECONDS as KEEPALIVE
from edda.web.sse import MAX_SECONDS as LIFETIME
from edda.web.sse import MAX_STREAMS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "control-api.md"

INTRODUCTION = f"""# The control API

<!-- Written by `python -m tests.web.api_page` from src/edda/control/controller.py. Do not edit. -->

All queries and actions of the viewer and the command line, as JSON over HTTP, below `{PREFIX}` of a served app.
`GET {PREFIX}/openapi.json` returns its OpenAPI 3.1 description.

```text
curl -H 'authorization: Bearer <token>' 'http://127.0.0.1:8001{PREFIX}/runs?status=failed&limit=5'
```

The Python client is `RemoteController(url, token)` of `edda.control.remote`; each operation is a method of it.

## Authentication

- With tokens ([how to set them](../how-to/serving.md)): `Authorization: Bearer <token>`; the token needs the scope of
  the operation. A browser logs in with a token at `/_edda/login` and gets a cookie that is valid for 12 hours below
  `/_edda`; it becomes invalid when its token is removed.
- Without tokens: only clients on this machine, under a loopback name, with all scopes.
- A request that changes something must have a token in the header, or come from a page of this server itself, as
  browsers state with `Sec-Fetch-Site` or `Origin`.
- Every action is recorded with the name of the token and the address of the client: `GET {PREFIX}/audits`.

## Operations
"""
AFTER = f"""
Path parameters, in braces, are percent-encoded and may contain any character, also a slash (`%2F`). A list in a query
repeats its name: `status=failed&status=cancelled`. A body without required fields may be omitted.

Lists are returned in pages of at most {MAX_PAGE_SIZE} items: pass `next` as `cursor` to get the next page; `null` means
that there is none. `searched_to` is the time back to which ids were searched for `q`, and inputs for `input`: pass it
as `until` to search older runs; `null` means that all runs were searched.

`GET {PREFIX}/stream` is a stream of server-sent events and needs the scope `view`: `event: changed` after every change,
the first one at once, at most one per second; a comment every {KEEPALIVE:.0f} seconds. It ends after {LIFETIME:.0f}
seconds, and when the app drains; browsers reconnect by themselves. At most {MAX_STREAMS} streams are open at once.

`GET /_edda/metrics` is the text format of Prometheus (0.0.4) and needs the scope `view`; the database is queried at
most every 5 seconds.

## Errors

Every error is JSON like [those of the HTTP endpoint](http.md#responses): `error`, `error_type`, `retryable`, and
`attribute` if the error is in one field.

| Status | When |
|---|---|
"""


def write_page() -> str:
    errors = "".join(f"| {status} | {text} |\n" for status, text in ERRORS.items())
    return "".join((INTRODUCTION, *_operations(), AFTER, errors, *_records()))


def _operations() -> Iterator[str]:
    yield "\n| Request | Method | Scope | Query | Body | Response | |\n|---|---|---|---|---|---|---|\n"
    for one in OPERATIONS:
        kinds = (_link(kind) for kind in (one.query, one.body))
        cells = (f"`{one.method} {one.path}`", f"`{one.name}`", one.scope, *kinds, _answer(one), one.summary)
        yield f"| {' | '.join(cells)} |\n"


def _answer(one: Operation[Any]) -> str:
    return _format_type(inspect.type_info(one.response))


def _link(kind: type | None) -> str:
    return "" if kind is None else f"`{kind.__name__}`"


def _records() -> Iterator[str]:
    requests = [kind for one in OPERATIONS for kind in (one.query, one.body) if kind is not None]
    results = [one.response for one in OPERATIONS]
    yield "\n## Queries and bodies\n"
    yield from map(_record, _records_in(inspect.multi_type_info(requests)))
    yield "\n## Results\n"
    yield from map(_record, _records_in(inspect.multi_type_info(results)))


def _records_in(kinds: Iterable[inspect.Type]) -> list[inspect.StructType]:
    """Every record in them once, in the order of occurrence."""
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
    cells = ((f"`{one.name}`", _format_type(one.type), _default(one), words.get(one.name, "")) for one in kind.fields)
    rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return f"\n### {kind.cls.__name__}\n\n| Field | Type | Default | |\n|---|---|---|---|\n{rows}"


@cache
def _words() -> dict[str, dict[str, str]]:
    """Docstrings of fields, by record and field."""
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


def _format_type(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _format_enum(kind)
        case inspect.UnionType():
            return " or ".join(map(_format_type, kind.types))
        case inspect.VarTupleType():
            return f"list of {_format_type(kind.item_type)}"
        case inspect.DictType():
            return (
                "object"
                if isinstance(kind.value_type, inspect.AnyType)
                else f"object of {_format_type(kind.value_type)}"
            )
        case inspect.StructType():
            return f"`{kind.cls.__name__}`" if (item := _item(kind)) is None else f"page of {_format_type(item)}"
        case inspect.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case _:
            return _PLAIN[type(kind)]


def _format_enum(kind: inspect.Metadata) -> str:
    words = (kind.extra_json_schema or {}).get("enum")
    return _format_type(kind.type) if words is None else ", ".join(f"`{word}`" for word in words)


def _item(kind: inspect.StructType) -> inspect.Type | None:
    """The item type of a page, or None for other records."""
    items = next((field.type for field in kind.fields if field.name == "items"), None)
    return items.item_type if isinstance(items, inspect.VarTupleType) else None


_PLAIN: dict[type, str] = {
    inspect.AnyType: "any JSON",
    inspect.NoneType: "null",
    inspect.StrType: "text",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "true or false",
    inspect.DateTimeType: "time (RFC 3339)",
}


if __name__ == "__main__":
    PAGE.write_text(write_page())
