"""The arguments of a workflow from JSON that somebody typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from edda.core.signature import Signature
from edda.core.validation import ValidationFailure, validate
from edda.errors import ArgumentError


def parse_arguments(workflow: str, signature: Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """By name, and of the types that the code asks for; raises `ArgumentError` that names every field."""
    errors = [*_missing(signature, given)]
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if name not in signature.parameters:
            arguments[name] = value
            continue
        try:
            arguments[name] = validate(value, msgspec.json.encode(value), signature.parameters[name])
        except ValidationFailure as misfit:
            errors += [f"{_place(name, path)}: {message}" for path, message in misfit.errors]
    if errors:
        raise ArgumentError(f"{workflow} cannot be started like this:\n  " + "\n  ".join(errors))
    return arguments


def _missing(signature: Signature, given: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name}: is required" for name in signature.required if name not in given)
    if not signature.takes_any:
        yield from (f"{name}: there is no such parameter" for name in given if name not in signature.names)


def _place(name: str, path: str) -> str:
    return name if path == "$" else f"{name}{path if path.startswith('[') else f'.{path}'}"
