"""`edda runs watch` on a terminal."""

from __future__ import annotations

import asyncio
import errno
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from tests.cli.shell import APP, PATIENCE, ROOT, Shell, make_tables

WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from edda.cli import main; main()"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

pytestmark = pytest.mark.processes


@pytest.fixture
async def shell(tmp_path: Path) -> Shell:
    url = f"sqlite:///{tmp_path}/shop.db"
    await make_tables(url)
    return Shell({"EDDA_DB_URL": url, "EDDA_TEST_FIXED": str(tmp_path / "fixed")})


async def type_in(shell: Shell, *command: str) -> tuple[int, str]:
    """The exit code of a command on a terminal, and what came out of it."""
    ours, theirs = pty.openpty()
    environment = os.environ | shell.environment | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        async with asyncio.timeout(PATIENCE):
            shown = await asyncio.to_thread(_read_all, ours)
            return await process.wait(), shown
    finally:
        if process.returncode is None:  # which also ends the reading
            process.kill()
            await process.wait()
        os.close(ours)


def _read_all(terminal: int) -> str:
    read = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # what Linux says when nobody writes there any more
                raise
            break
        if not part:
            break
        read += part
    return read.decode()


async def test_a_run_is_drawn_in_place_until_it_fails(shell: Shell) -> None:
    await shell.do("runs", "start", "wrap", "--app", APP, "--arg", "order_id=B", "--id", "wrap-B")
    async with shell.running("worker", APP):
        code, shown = await type_in(shell, "-m", "edda", "runs", "watch", "wrap-B")
    assert code == 1
    assert "\x1b[?25l" in shown  # the cursor is hidden while it is drawn
    plain = _ESCAPES.sub("", shown)
    for part in ("✖ failed", "• reserve", "▓", "no box for B"):
        assert part in plain


async def test_without_rich_each_change_is_a_line(shell: Shell) -> None:
    await shell.do("runs", "start", "wrap", "--app", APP, "--arg", "order_id=B", "--id", "wrap-B")
    async with shell.running("worker", APP):
        code, shown = await type_in(shell, "-c", WITHOUT_RICH, "runs", "watch", "wrap-B")
    assert code == 1
    assert "step pack: failed, 2 attempts" in _ESCAPES.sub("", shown)


async def test_a_table_on_a_terminal_is_as_wide_as_it(shell: Shell) -> None:
    reason = "x" * 300
    await shell.do("runs", "start", "ship", "--app", APP, "--arg", "order_id=A", "--id", "ship-A")
    await shell.do("runs", "cancel", "ship-A", "--reason", reason)
    code, shown = await type_in(shell, "-m", "edda", "audit")
    assert code == 0
    lines = _ESCAPES.sub("", shown).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.endswith("…") for line in lines)


async def test_the_shell_can_complete_commands() -> None:
    completing = {"_EDDA_COMPLETE": "bash_complete", "COMP_WORDS": "edda runs re", "COMP_CWORD": "2"}
    completing_command = "import sys; sys.argv[0] = 'edda'; from edda.cli import main; main(prog_name='edda')"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        completing_command,
        env=os.environ | completing,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert {line.partition(",")[2] for line in said.decode().splitlines()} == {"result", "resume", "retry"}
