"""The worker processes under fire: born, killed, stopped and woken again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

from msgspec import Struct, structs

from .fork_server import ForkServer
from .worker import Orders

PATIENCE = 60.0


class Member(Struct, eq=False):
    pid: int
    orders: Orders
    stopped_until: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.orders.file("ready").exists()

    @property
    def log(self) -> str:
        file = self.orders.file("log")
        return file.read_text() if file.exists() else ""

    def send(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)


class Fleet:
    def __init__(self, orders: Orders, urls: Sequence[str] = ()) -> None:
        self._orders = orders
        self._urls = urls or (orders.url,)
        self._fork_server = ForkServer()
        self._numbers = count(1)
        self.members: list[Member] = []

    def launch(self, port: int | None = None) -> Member:
        number = next(self._numbers)
        name, seed = f"{self._orders.name}{number}", self._orders.seed + number
        url = self._urls[number % len(self._urls)]
        orders = structs.replace(self._orders, name=name, seed=seed, port=port, url=url)
        member = Member(self._fork_server.fork(orders), orders)
        self.members.append(member)
        return member

    def kill(self, member: Member) -> None:
        self.members.remove(member)
        self._fork_server.kill(member.pid)

    def stop(self, member: Member, seconds: float) -> None:
        member.send(signal.SIGSTOP)
        member.stopped_until = time.monotonic() + seconds

    def wake(self, *, all: bool = False) -> None:
        """Those whose time has come."""
        for member in self.members:
            if member.stopped_until is not None and (all or time.monotonic() >= member.stopped_until):
                member.send(signal.SIGCONT)
                member.stopped_until = None

    @property
    def awake(self) -> list[Member]:
        return [member for member in self.members if member.stopped_until is None]

    def calm_down(self) -> None:
        self.wake(all=True)
        for member in self.members:
            member.send(signal.SIGUSR1)

    def deserters(self) -> list[Member]:
        """Processes that ended though nobody killed them."""
        ended = set(self._fork_server.look())
        gone = [member for member in self.members if member.pid in ended]
        self.members = [member for member in self.members if member.pid not in ended]
        return gone

    def wait_until_ready(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while not all(member.is_ready for member in self.members):
            assert not self.deserters(), "a worker ended before it began"
            assert time.monotonic() < give_up, "the workers do not begin"
            time.sleep(0.01)

    def close(self) -> None:
        self._fork_server.close()


# PostgreSQL's driver leaves such a future behind when its line is cut while it connects; a lost task is another matter.
# SQLAlchemy's pools call it an error when a line that was cut cannot be closed in good order.
_DRIVERS_OWN = ("asyncio: Future exception was never retrieved", "Pool: Exception ")
# Some compensations of the workload fail on purpose, which is an error of the user's code.
_ON_PURPOSE = ("what it should undo stands: TerminalError", "what it should undo stands: HopelessError")
# The task in which SQLAlchemy closes a connection goes on when the step that waited for it is cancelled.
_DRIVERS_TASK = "_terminate_graceful_close() done"


def complaints(folder: Path) -> list[str]:
    """What the product itself called an error, and what was printed though it should have been handled."""
    found = []
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text().splitlines()
        found += [line for line, after in pairwise([*lines, ""]) if _is_complaint(line) and _DRIVERS_TASK not in after]
    for output in sorted(folder.glob("*.output")):
        found += output.read_text().splitlines()
    return found


def _is_complaint(line: str) -> bool:
    is_known = any(known in line for known in (*_ON_PURPOSE, *_DRIVERS_OWN))
    return (" ERROR " in line or " CRITICAL " in line) and not is_known
