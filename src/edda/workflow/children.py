"""Child runs: the steps of a workflow that start another run, or wait for the end of one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from edda.core.codec import Codec
from edda.core.exceptions import decode_failure, encode_failure
from edda.core.model import Entry, EntryKind, RunId
from edda.core.states import RunStatus
from edda.errors import WorkflowCancelledError

from .context import RunContext

if TYPE_CHECKING:
    from .workflow import StartOptions, Workflow

T = TypeVar("T")


class RunEnded(Struct, frozen=True):
    """How a run ended; put into the inbox of each run that waits for it."""

    run_id: RunId
    status: RunStatus
    value: bytes

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> RunEnded:
        return msgspec.msgpack.decode(data, type=cls)

    @property
    def is_ok(self) -> bool:
        return self.status is RunStatus.COMPLETED

    def outcome(self, codec: Codec) -> bytes:
        """The encoded result, or the encoded error that the waiting step raises."""
        if self.status is not RunStatus.CANCELLED:
            return self.value
        reason = codec.decode(self.value)
        return encode_failure(codec, WorkflowCancelledError(f"run {self.run_id} was cancelled: {reason}"))


class ChildStarted(Struct, frozen=True):
    """Recorded in the parent's history when the child is stored."""

    run_id: str
    cancel_with_parent: bool
    is_awaited: bool


class ChildCall(Struct, frozen=True):
    """What the engine needs to start a child, or to watch the end of a run."""

    workflow: str | None
    """None: the run exists already, and is only waited for."""
    input: bytes
    options: StartOptions | None
    is_awaited: bool
    has_custom_id: bool
    """The user chose the id, so the run may exist already."""
    cancel_with_parent: bool


def start_child(
    ctx: RunContext,
    workflow: Workflow[Any, Any],
    options: StartOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_awaited: bool,
) -> Coroutine[Any, Any, Any]:
    signature, codec = workflow.signature, ctx.codec
    input = signature.encode_input(codec, signature.bind(args, dict(kwargs)))
    call = ChildCall(workflow.name, input, options, is_awaited, options.id is not None, not options.detached)
    return ctx.execution.call(
        EntryKind.CHILD if is_awaited else EntryKind.START,
        workflow.name,
        input,
        decode=lambda entry: _decode(codec, entry, signature.returns),
        call=call,
        target=lambda step: options.id or child_id(ctx, step),
    )


def await_run(ctx: RunContext, run_id: str, returns: Any) -> Coroutine[Any, Any, Any]:
    codec, input = ctx.codec, ctx.codec.encode(run_id)
    return ctx.execution.call(
        EntryKind.CHILD,
        "result",
        input,
        decode=lambda entry: _decode(codec, entry, returns),
        call=ChildCall(None, b"", None, is_awaited=True, has_custom_id=True, cancel_with_parent=False),
        target=lambda step: run_id,
    )


async def with_timeout(wait: Coroutine[Any, Any, T], seconds: float, run_id: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await wait
    except TimeoutError:
        raise TimeoutError(f"run {run_id} did not end within {seconds} seconds; it continues") from None


def child_id(ctx: RunContext, step: str) -> str:
    """A hash of the parent's id and the step, so that every replay starts the same child."""
    path = f"{ctx.instance_id}/{ctx.generation}/{step}"
    return f"child-{blake2b(path.encode(), digest_size=16).hexdigest()}"


def _decode(codec: Codec, entry: Entry, returns: Any) -> Any:
    if not entry.ok:
        return decode_failure(codec, entry.value)
    if entry.kind is EntryKind.START:
        return codec.decode(entry.value, ChildStarted).run_id
    return codec.decode_recorded(entry.value, returns, "the result of the run of step", entry.step)
