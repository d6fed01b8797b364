"""A state is a shape, a word and a colour: no one of them alone."""

from __future__ import annotations

from edda.cli.terminal import StyledText
from edda.core.states import RunStatus

_GLYPHS = {
    RunStatus.RUNNING: ("▶", "running", "cyan"),
    RunStatus.WAITING_FOR_EVENT: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_TIMER: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_MESSAGE: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_CHILD: ("◷", "waiting", "yellow"),
    RunStatus.COMPENSATING: ("↶", "undoing", "magenta"),
    RunStatus.PARKED: ("‖", "parked", "red"),
    RunStatus.COMPLETED: ("✔", "completed", "green"),
    RunStatus.FAILED: ("✖", "failed", "red"),
    RunStatus.CANCELLED: ("⊘", "cancelled", "dim"),
    RunStatus.RECURRED: ("↻", "recurred", "green"),
}


def status_label(status: str) -> StyledText:
    try:
        shape, word, style = _GLYPHS[RunStatus(status)]
    except ValueError:  # of a newer server
        return StyledText(f"? {status}")
    return StyledText(f"{shape} {word}", style)
