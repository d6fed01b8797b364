"""A Galera cluster of our own: MariaDB servers on loopback ports, from Debian's packages, gone with this process."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.databases import MySQLServer
from tests.servers import PATIENCE, Unavailable, at_exit, folder_of_ours, free_port, identity, own_account, run_to_end
from tests.tiers import skip_unless_ci

PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")
_SYNCED = "Synced"
_POSITION = re.compile(r"Recovered position: (\S+)")


class Node:
    def __init__(self, number: int, folder: Path, server: str, provider: str) -> None:
        self.number = number
        self.port, self._group, self._transfer, self._snapshot = (free_port() for _ in range(4))
        self.url = f"mysql://root@127.0.0.1:{self.port}/mysql"
        self._folder = folder
        self._server = server
        self._provider = provider
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._group}"

    @property
    def data(self) -> Path:
        return self._folder / "data"

    @property
    def log(self) -> Path:
        return self._folder / "log"

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, peers: Sequence[str], *extra: str) -> None:
        """Returns at once; without peers it is the first of a new cluster."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command(peers), *extra], cwd=self._folder, stdout=log, stderr=log, **identity()
            )

    def _command(self, peers: Sequence[str]) -> list[str]:
        options = (
            f"gmcast.listen_addr=tcp://{self.address}",
            f"ist.recv_addr=127.0.0.1:{self._transfer}",
            "gcache.size=64M",
            # A node that is killed is missed after a second instead of five.
            "evs.suspect_timeout=PT1S;evs.inactive_timeout=PT3S;evs.keepalive_period=PT0.3S;evs.inactive_check_period=PT0.3S",
        )
        return [
            self._server,
            "--no-defaults",
            f"--datadir={self.data}",
            # A server that starts removes the temporary tables that it finds, which may be another's.
            f"--tmpdir={self._folder}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={self._folder / 'socket'}",
            f"--pid-file={self._folder / 'pid'}",
            "--default-time-zone=+05:45",
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
            # What was committed outlives the process, though not the machine.
            "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=16M",
            "--wsrep-on=ON",
            f"--wsrep-provider={self._provider}",
            f"--wsrep-provider-options={';'.join(options)}",
            "--wsrep-cluster-name=edda_test",
            f"--wsrep-cluster-address=gcomm://{','.join(peers)}",
            f"--wsrep-node-name=node{self.number}",
            f"--wsrep-node-address={self.address}",
            f"--wsrep-node-incoming-address=127.0.0.1:{self.port}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-sst-receive-address=127.0.0.1:{self._snapshot}",
            "--wsrep-slave-threads=2",
        ]

    def kill(self) -> None:
        """With SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def recover(self) -> str:
        """Up to which transaction it had all when it was killed: from there on the others send what it missed."""
        done = subprocess.run(
            [*self._command(()), "--wsrep-recover"],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            **identity(),
        )
        found = _POSITION.search(done.stderr + done.stdout)
        if found is None:
            raise Unavailable(f"node {self.number} cannot be recovered: {done.stderr[-2000:]}")
        return found[1]

    def wait_until_synced(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while not MySQLServer.says(self.url, "SHOW STATUS LIKE 'wsrep_local_state_comment'", _SYNCED):
            if not self.is_up or time.monotonic() > give_up:
                raise Unavailable(f"node {self.number} does not join: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)


class Cluster:
    def __init__(self, size: int = 3) -> None:
        server, provider = shutil.which("mariadbd"), next(filter(_exists, PROVIDERS), None)
        if server is None or provider is None or shutil.which("rsync") is None:
            raise Unavailable("no Galera: install mariadb-server, galera-4 and rsync")
        self.nodes: list[Node] = []
        for number in range(size):
            folder = folder_of_ours()
            self.nodes.append(Node(number, folder, server, provider))
            self.nodes[-1].data.mkdir()
            own_account(self.nodes[-1].data)
        at_exit(self.stop)
        first = self.nodes[0]
        installer = shutil.which("mariadb-install-db")
        assert installer is not None, "mariadbd without mariadb-install-db"
        run_to_end(
            first.data.parent,
            [
                installer,
                "--no-defaults",
                f"--datadir={first.data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                f"--tmpdir={first.data.parent}",
            ],
        )
        first.start((), "--wsrep-new-cluster")
        first.wait_until_synced()
        for node in self.nodes[1:]:  # one by one: each gets a copy of the first, which gives one at a time
            node.start([first.address])
            node.wait_until_synced()

    def urls(self, database: str) -> tuple[str, ...]:
        return tuple(node.url.removesuffix("mysql") + database for node in self.nodes)

    def kill(self, node: Node) -> None:
        node.kill()

    def rejoin(self, node: Node) -> None:
        """Returns when it has all that it missed."""
        peers = [other.address for other in self.nodes if other.is_up]
        node.start(peers, f"--wsrep-start-position={node.recover()}")
        node.wait_until_synced()

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


def _exists(path: str) -> bool:
    return Path(path).exists()


@cache
def _started(size: int) -> Cluster | str:
    try:
        return Cluster(size)
    except Unavailable as error:
        return str(error)


def two_nodes() -> Cluster:
    """One for all tests of this process; they are skipped without it, but never silently where it counts."""
    cluster = _started(2)
    if isinstance(cluster, str):
        skip_unless_ci(cluster)
    return cluster
