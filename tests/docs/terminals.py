"""What a reader with a terminal does: run a program in the background, hear what it says, type a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0
"""Seconds any single thing may take; it takes one or two."""

_CURL_SETTINGS = 'silent\nshow-error\nnoproxy = "*"\nwrite-out = "\\n%{http_code}"\n'


class Terminal:
    """A folder to work in, and a home whose settings make curl tell the status too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".curlrc").write_text(_CURL_SETTINGS)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def curl(self, command: str) -> tuple[int, str]:
        """The status and the body of the answer."""
        done = self.run(command)
        assert done.returncode == 0, done.stderr
        body, _, status = done.stdout.rpartition("\n")
        return int(status), body

    @contextmanager
    def background(self, command: str) -> Iterator[Program]:
        """Ends it with Ctrl-C, if it has not ended by itself."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            program = Program(process)
            try:
                yield program
            finally:
                program.interrupt()

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {"PATH": path, "HOME": str(self.folder), "PYTHONUNBUFFERED": "1"}
        return {key: value for key, value in os.environ.items() if not key.startswith("EDDA_")} | ours


class Program:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""

    def hear(self, words: str) -> str:
        """All that it says until a line with these words, and that line."""
        assert self.process.stdout is not None
        begin = len(self.said)
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return self.said[begin:]
        raise AssertionError(f"it ended without saying {words!r}:\n{self.said}")

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        return self.process.wait(PATIENCE)

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.end()
