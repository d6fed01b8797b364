"""JSON schemas of annotations, for forms: what pydantic does not know has none."""

from __future__ import annotations

from typing import Any

from .signature import Signature
from .validation import find_adapter


def load() -> None:
    """Import pydantic, which takes a moment: call it in a thread before the first schema is made."""
    import pydantic.json_schema
    import pydantic.type_adapter  # noqa: F401 - loaded for those who come after


def schema_of(annotation: Any) -> dict[str, Any] | None:
    """Of one value that comes in as JSON, such as the data of an event."""
    from pydantic.errors import PydanticUserError

    adapter = find_adapter(annotation)
    if adapter is None:
        return None
    try:
        return adapter.json_schema(by_alias=True)
    except PydanticUserError:  # it can be validated, but not described: a callable, say
        return None


def input_schema(signature: Signature) -> dict[str, Any]:
    """Of an object with the arguments of a function by name."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, annotation in signature.parameters.items():
        # A parameter that cannot be described may be anything, and the others are described all the same.
        described = {} if annotation is Any else schema_of(annotation) or {}
        definitions |= described.pop("$defs", {})
        properties[name] = described | _default(signature, name)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(signature.required)}
    if not signature.takes_any:
        schema["additionalProperties"] = False
    return schema | ({"$defs": definitions} if definitions else {})


def _default(signature: Signature, name: str) -> dict[str, Any]:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    if name not in signature.defaults:
        return {}
    try:
        return {"default": to_jsonable_python(signature.defaults[name])}
    except (PydanticSerializationError, ValueError):
        return {}
