"""OpenAPI 3.1: the control API described for programs, out of the same table that it is served from."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import Struct, inspect

from edda.control.operations import MOST_ROWS, OPERATIONS, PREFIX, Operation
from edda.version import __version__

from .parsing import fields_of, is_or_contains

Described = dict[str, Any]


class Problem(Struct, frozen=True):
    """Why something was refused."""

    error: str
    error_type: str
    retryable: bool
    attribute: str | None = None
    """The field that is the matter."""


REFUSALS = {
    400: "Not understood: not JSON, a header twice.",
    401: "No token, or one that is not known.",
    403: "The token lacks the scope, or the request comes from elsewhere.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    409: "The state of the run does not allow it.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "A field is not what was expected; `attribute` says which.",
    429: "Too many requests at once: come back.",
    431: "Too many headers, or too long.",
    503: "The database does not take it at the moment: come back.",
}
_REF = "#/components/schemas/{name}"


@cache
def describe() -> Described:
    schemas, components = _schemas()
    paths: dict[str, Described] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, schemas, components)
    paths["/stream"] = {"get": _stream()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Edda control API", "version": __version__},
        "servers": [{"url": PREFIX}],
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> tuple[dict[Any, Described], dict[str, Described]]:
    """By type, and those that have a name."""
    kinds: list[Any] = [Problem]
    for operation in OPERATIONS:
        kinds += [kind for kind in (operation.answer, operation.query, operation.body) if kind is not None]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    return dict(zip(kinds, schemas, strict=True)), components


def _describe(operation: Operation[Any], schemas: dict[Any, Described], components: dict[str, Described]) -> Described:
    described: Described = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"Needs a token with the scope `{operation.scope}`.",
        "parameters": [*_path_parameters(operation), *_query_parameters(operation, components)],
        "responses": _responses(schemas[operation.answer]),
    }
    if operation.body is not None:
        required = bool(components[operation.body.__name__].get("required"))
        content = {"application/json": {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": required, "content": content}
    return described


def _path_parameters(operation: Operation[Any]) -> list[Described]:
    names = [part.strip("{}") for part in operation.parts if part.startswith("{")]
    number, text = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": number if name == "number" else text} for name in names
    ]


def _query_parameters(operation: Operation[Any], components: dict[str, Described]) -> list[Described]:
    if operation.query is None:
        return []
    return [
        {
            "name": field.name,
            "in": "query",
            "schema": _parameter(field, components[operation.query.__name__]),
            "allowEmptyValue": True,  # as forms send what was not filled in
        }
        for field in fields_of(operation.query)
    ]


def _parameter(field: inspect.Field, record: Described) -> Described:
    """What is not given has no text: it is left out instead."""
    schema: Described = dict(record["properties"][field.name])
    others = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if others:
        schema = dict(others[0])
    if field.name == "limit":
        schema |= {"minimum": 1, "maximum": MOST_ROWS}
    if is_or_contains(field.type, inspect.DateTimeType):
        schema["format"] = "date-time"
    return schema


def _responses(answer: Described) -> Described:
    responses: Described = {"200": {"description": "Done.", "content": {"application/json": {"schema": answer}}}}
    problem = {"application/json": {"schema": {"$ref": _REF.format(name=Problem.__name__)}}}
    for status, words in REFUSALS.items():
        responses[str(status)] = {"description": words, "content": problem}
    return responses


def _stream() -> Described:
    responses = _responses({})
    responses["200"] = {
        "description": "`event: changed` whenever something has changed; ends after a minute: ask again.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
    return {"operationId": "watch", "summary": "Changes, as they happen.", "responses": responses}
