"""The OpenAPI 3.1 description of the control API, made from the table of operations that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct, inspect

from edda.control.controller import OPERATIONS, PREFIX, Operation
from edda.control.views import MAX_PAGE_SIZE
from edda.version import __version__

from .parsing import fields_of, is_or_contains

JSONObject = dict[str, Any]


class Problem(Struct, frozen=True):
    """Body of an error response."""

    error: str
    error_type: str
    retryable: bool
    attribute: str | None = None
    """The field with the error."""


ERRORS = {
    400: "The request is malformed: no JSON, a header twice.",
    401: "No token, or an unknown one.",
    403: "The token lacks the scope, or the request comes from another origin.",
    404: "Not found.",
    408: "The body arrived too slowly.",
    409: "The state of the run does not allow this action.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "A field is invalid; `attribute` names it, if it is one field.",
    429: "Too many requests at once: retry after `Retry-After` seconds.",
    431: "Too many headers, or too large ones.",
    503: "The database is not available: retry after `Retry-After` seconds.",
}
_REF = "#/components/schemas/{name}"


@cache
def describe() -> JSONObject:
    schemas, components = _schemas()
    paths: dict[str, JSONObject] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas, components)
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


def _schemas() -> tuple[dict[Any, JSONObject], dict[str, JSONObject]]:
    """The schema of each type, and the named schemas that they refer to."""
    kinds: list[Any] = [Problem]
    for operation in OPERATIONS:
        kinds += [kind for kind in (operation.response, operation.query, operation.body) if kind is not None]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    return dict(zip(kinds, schemas, strict=True)), components


def _operation(
    operation: Operation[Any], schemas: dict[Any, JSONObject], components: dict[str, JSONObject]
) -> JSONObject:
    description: JSONObject = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"Needs a token with the scope `{operation.scope}`.",
        "parameters": list(_parameters(operation, components)),
        "responses": _responses(schemas[operation.response]),
    }
    if operation.body is not None:
        required = bool(components[operation.body.__name__].get("required"))
        content = {"application/json": {"schema": schemas[operation.body]}}
        description["requestBody"] = {"required": required, "content": content}
    return description


def _parameters(operation: Operation[Any], components: dict[str, JSONObject]) -> Iterator[JSONObject]:
    number, text = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
    for part in operation.parts:
        if part.startswith("{"):
            schema = number if part == "{number}" else text
            yield {"name": part.strip("{}"), "in": "path", "required": True, "schema": schema}
    if operation.query is None:
        return
    for field in fields_of(operation.query):
        schema = _parameter(field, components[operation.query.__name__])
        # Forms send a field that was not filled in.
        yield {"name": field.name, "in": "query", "schema": schema, "allowEmptyValue": True}


def _parameter(field: inspect.Field, record: JSONObject) -> JSONObject:
    """A query parameter cannot be null: it is left out instead."""
    schema: JSONObject = dict(record["properties"][field.name])
    others = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if others:
        schema = dict(others[0])
    if field.name == "limit":
        schema |= {"minimum": 1, "maximum": MAX_PAGE_SIZE}
    if is_or_contains(field.type, inspect.DateTimeType):
        schema["format"] = "date-time"
    return schema


def _responses(answer: JSONObject) -> JSONObject:
    responses: JSONObject = {"200": {"description": "Done.", "content": {"application/json": {"schema": answer}}}}
    problem = {"application/json": {"schema": {"$ref": _REF.format(name=Problem.__name__)}}}
    for status, text in ERRORS.items():
        responses[str(status)] = {"description": text, "content": problem}
    return responses


def _stream() -> JSONObject:
    responses = _responses({})
    responses["200"] = {
        "description": "Sends `event: changed` after every change; ends after a minute, then connect again.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
    return {"operationId": "watch", "summary": "Server-sent events after every change.", "responses": responses}
