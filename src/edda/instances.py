"""Finding runs by what they were started with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, TypedDict

from msgspec.structs import replace

from edda.control.run_search import at_path, same
from edda.core.codec import Codec
from edda.core.model import RunFilter, RunId, RunRecord
from edda.workflow.context import as_datetime

_MOST_LOOKED_AT = 10_000
"""Runs one call goes through when it filters by input."""


class Instance(TypedDict):
    instance_id: str
    workflow_name: str
    status: str
    input_data: Any
    started_at: datetime
    ended_at: datetime | None
    waiting_for: str | None


class InstancePage(TypedDict):
    instances: list[Instance]
    next_page_token: str | None
    has_more: bool


class Instances:
    def __init__(self, find: Callable[[RunFilter], Awaitable[tuple[RunRecord, ...]]], codec: Codec) -> None:
        self._find = find
        self._codec = codec

    async def find(self, filter: RunFilter, wanted: Mapping[str, Any], page_token: str | None) -> InstancePage:
        if not 1 <= filter.limit <= 1000:
            raise ValueError(f"find_instances(limit={filter.limit}): from 1 to 1000")
        before = None if page_token is None else _read_token(page_token)
        found, last = await self._find_matching(
            replace(filter, before=before, limit=filter.limit + 1), wanted, filter.limit
        )
        return {
            "instances": [self._describe(record) for record in found],
            "next_page_token": None if last is None else f"{last[0]}:{last[1]}",
            "has_more": last is not None,
        }

    async def _find_matching(
        self, filter: RunFilter, wanted: Mapping[str, Any], limit: int
    ) -> tuple[list[RunRecord], tuple[int, RunId] | None]:
        """One page, and the key to go on from if there may be more."""
        found: list[RunRecord] = []
        looked_at = 0
        while True:
            records = await self._find(filter)
            for record in records:
                key = (record.created_at, record.run_id)
                if self._fits(record, wanted):
                    if len(found) == limit:
                        return found, (found[-1].created_at, found[-1].run_id)
                    found.append(record)
            looked_at += len(records)
            if len(records) < filter.limit:
                return found, None
            if looked_at >= _MOST_LOOKED_AT:
                return found, key
            filter = replace(filter, before=key)

    def _fits(self, record: RunRecord, wanted: Mapping[str, Any]) -> bool:
        if not wanted:
            return True
        arguments = self._codec.decode(record.input)
        return all(same(at_path(arguments, path), value) for path, value in wanted.items())

    def _describe(self, record: RunRecord) -> Instance:
        return {
            "instance_id": record.run_id,
            "workflow_name": record.workflow,
            "status": record.status.value,
            "input_data": self._codec.decode(record.input),
            "started_at": as_datetime(record.created_at),
            "ended_at": None if record.ended_at is None else as_datetime(record.ended_at),
            "waiting_for": record.reason,
        }


def _read_token(token: str) -> tuple[int, RunId]:
    created, separator, run_id = token.partition(":")
    if not separator or not created.isdigit():
        raise ValueError(f"page_token {token!r} is not one that find_instances returned")
    return int(created), RunId(run_id)
