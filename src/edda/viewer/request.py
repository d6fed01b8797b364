"""The request for a page, and what a page handler returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from edda.errors import ArgumentError
from edda.web.responses import http_error

_MAX_FIELDS = 2_000

Pairs = tuple[tuple[str, str], ...]


class QueryParams:
    """The pairs of a query or of a form, by name."""

    def __init__(self, pairs: Pairs = ()) -> None:
        self.pairs = pairs

    @classmethod
    def read(cls, text: bytes) -> QueryParams:
        if text.count(b"&") >= _MAX_FIELDS:  # each may become a row, and rendering blocks the event loop
            raise http_error(413, f"more than {_MAX_FIELDS} fields: use the API or Python instead")
        return cls(tuple(parse_qsl(text.decode("latin-1"), keep_blank_values=True, errors="replace")))

    def get(self, name: str) -> str | None:
        """None also for an empty value: forms send every field."""
        return next((value.strip() or None for key, value in self.pairs if key == name), None)

    def raw(self, name: str) -> str | None:
        """Not stripped: an id may begin or end with white space."""
        return next((value for key, value in self.pairs if key == name), None)

    def number(self, name: str) -> int | None:
        text = self.get(name) or ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    def time(self, name: str) -> datetime | None:
        """In UTC if it has no zone."""
        text = self.get(name)
        if text is None:
            return None
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise ArgumentError(f"{name}={text!r}: expected a time such as 2026-01-31T08:00 (UTC)") from None
        return time if time.tzinfo else time.replace(tzinfo=UTC)

    def all(self, name: str) -> tuple[str, ...]:
        return tuple(value for key, value in self.pairs if key == name and value.strip())

    def without(self, *names: str) -> QueryParams:
        return QueryParams(tuple(pair for pair in self.pairs if pair[0] not in names and pair[1]))

    def with_value(self, name: str, *values: str) -> QueryParams:
        """With these values in place of the former ones of that name."""
        return QueryParams(self.without(name).pairs + tuple((name, value) for value in values))

    def toggle(self, name: str, values: tuple[str, ...]) -> QueryParams:
        """Without these values if all of them are present, else with them."""
        present = self.all(name)
        if set(values) <= set(present):
            return self.with_value(name, *(value for value in present if value not in values))
        return self.with_value(name, *present, *(value for value in values if value not in present))

    def __str__(self) -> str:
        return urlencode(self.pairs)


@dataclass(frozen=True, slots=True)
class PageRequest:
    method: str
    parts: tuple[str, ...]
    """Of the path below `/_edda`."""
    base: str
    """`Request.base`: every link begins with it."""
    query: QueryParams
    form: QueryParams
    user: str
    scopes: frozenset[str]
    """view, control, events."""
    flash: str | None = None
    """The result of the action that redirected here."""
    is_secure: bool = False
    """The scheme is https."""

    def link(self, *parts: str, query: QueryParams | None = None) -> str:
        path = "/".join((self.base, *(quote(part, safe="") for part in parts)))
        return f"{path}?{query}" if query and query.pairs else path


@dataclass(frozen=True, slots=True)
class Rendered:
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirect:
    """To another page, which shows `flash`."""

    to: str
    flash: str | None = None


@dataclass(frozen=True, slots=True)
class Download:
    name: str
    body: bytes


Reply = Rendered | Redirect | Download
