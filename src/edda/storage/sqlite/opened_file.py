"""Notices that a database file was removed or replaced while connections to it are open.

SQLite goes on writing to a file that no longer has a name: every commit succeeds, and is gone when the process ends. A
connection that is opened again would make a new, empty file instead.
"""

from __future__ import annotations

import logging
import os
import time

from edda.errors import NotConnectedError

EVERY = 0.5
"""Seconds between two looks, at most one per look of a connection."""

logger = logging.getLogger(__name__)


class OpenedFile:
    """The file that a storage opened; shared by its connections and used from their threads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._look_at = 0.0
        self._is_told = False

    def add_audit(self) -> None:
        """After the first connection was opened."""
        if self._identity is None:
            self._identity = self._find()

    def forget(self) -> None:
        """The storage is opened anew, on whichever file is there."""
        self._identity, self._look_at, self._is_told = None, 0.0, False

    def check(self, *, at_once: bool = False) -> None:
        """Raises if another file, or none, has the name now. Looks at the file system every half second."""
        now = time.monotonic()
        if self._identity is None or (now < self._look_at and not at_once):
            return
        found = self._find()
        if found == self._identity:
            self._look_at, self._is_told = now + EVERY, False
            return
        self._look_at = 0.0
        what = "was removed" if found is None else "was replaced by another file"
        if not self._is_told:
            self._is_told = True
            logger.critical(
                "database file %s %s while this process uses it; refusing to read and write until that file is back or "
                "the process is started again",
                self._path,
                what,
            )
        raise NotConnectedError(
            f"{self._path} {what} while this process uses it, so nothing that is written would be kept: put the file "
            "back, or start the process again"
        )

    def _find(self) -> tuple[int, int] | None:
        try:
            about = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError:  # a folder that may not be read, a network disk that is away: statements say what is wrong
            return self._identity
        return about.st_dev, about.st_ino
