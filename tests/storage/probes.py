"""Statement probes: they record statements, cut the connection, or stand for the death of the process."""

from __future__ import annotations


class SimulatedDeath(BaseException):
    """Stands for the end of the process: no code of Edda may catch it."""


class Listener:
    """Records the statements that were sent and those that were answered."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def before(self, statement: str) -> None:
        self.heard.append(("before", statement))

    def after(self, statement: str) -> None:
        self.heard.append(("after", statement))


class Trap(Listener):
    """Raises at one point, once: point 0 is before the first statement since it was armed, 1 after it, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self._points = 0
        self._error: BaseException | None = None

    @property
    def armed(self) -> bool:
        return self._error is not None

    def arm(self, point: int, error: BaseException) -> None:
        self._points, self._error = point, error

    def disarm(self) -> None:
        self._error = None

    def before(self, statement: str) -> None:
        super().before(statement)
        self._pass()

    def after(self, statement: str) -> None:
        super().after(statement)
        self._pass()

    def _pass(self) -> None:
        if self._error is None:
            return
        if self._points == 0:
            error, self._error = self._error, None
            raise error
        self._points -= 1
