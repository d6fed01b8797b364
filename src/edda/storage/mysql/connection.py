"""Sessions: one connection each, whose state is never uncertain; the factory that makes them; and pools of them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import asyncmy
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError

from edda.errors import NotConnectedError, StorageConflictError, StorageError, StorageUnavailableError
from edda.storage.ports import StatementProbe
from edda.storage.shared.pool import PooledSession, SessionPool
from edda.storage.shared.url_options import refuse_unknown_options

from . import faults
from .statement import DERIVED_ROWS, Statement, Value, bind, join_values, pack_messages

SQL_MODE = b"STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"

# The SQL comments are executed: the first by MariaDB only, the second by MySQL only. A process that stops inside a
# transaction must not hold its locks for ever; MySQL has no time-out for that, only one for idle connections.
# in_predicate_conversion_threshold = 0: a long IN list must stay a range of the primary key; MariaDB would turn it into
# a join, which locks in another order.
SETUP = (
    b"SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    b"SET SESSION autocommit = 1, sql_notes = 0, time_zone = '+00:00', innodb_lock_wait_timeout = 5, "
    b"sql_mode = '%b' /*M! , idle_transaction_timeout = 5, in_predicate_conversion_threshold = 0 */"
    b"/*!80000 , wait_timeout = 60 */; "
    b"SELECT VERSION(), @@max_allowed_packet" % SQL_MODE
)
# A locked row delays the whole batch: after a second the journal sends the runs that wait for it separately.
JOURNAL_SETUP = SETUP.replace(b"innodb_lock_wait_timeout = 5", b"innodb_lock_wait_timeout = 1")

# Read at every connect: the server may have been restarted as a node of a cluster since the last one.
CLUSTER = b"""SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'auto_increment_offset',
    'group_replication_single_primary_mode', 'group_replication_group_name')"""
# A Galera node commits before the other nodes have applied the commit. With this setting the first statement of every
# transaction waits until its node has applied everything that the cluster had committed when the statement arrived.
SYNC_WAIT = b"SET SESSION wsrep_sync_wait = 7"

BEGIN = b"START TRANSACTION"
COMMIT = b"COMMIT"
ROLLBACK = b"ROLLBACK"


def assertion(condition: bytes) -> bytes:
    """A statement that fails unless the condition holds, so that the server skips the rest of the message. Setting an
    unknown sql_mode is the one error that both servers raise on a condition without a stored program, and it changes
    no row."""
    return b"SET SESSION sql_mode = IF(%b, '%b', 'assertion failed')" % (condition, SQL_MODE)


ASSERT_ROW_COUNT = assertion(b"ROW_COUNT() = %b")


def join_all_rows(template: bytes, selects: Sequence[bytes]) -> Iterator[Statement]:
    """As `join_values`; fails unless each of the given rows changes one row."""
    for i in range(0, len(selects), DERIVED_ROWS):
        group = selects[i : i + DERIVED_ROWS]
        yield from join_values(template, group)
        yield bind(ASSERT_ROW_COUNT, len(group))


PACKET_MARGIN = 4_096
"""Bytes of a packet that are left for the protocol and for the short statements around a long one."""

_WRONG_VALUE = 1231
Row = tuple[Any, ...]


class Reply(NamedTuple):
    affected: int
    rows: Sequence[Row]


class ReplyRows:
    """The rows of several replies, by the template of their statement."""

    def __init__(self, statements: Iterable[Statement], replies: Iterable[Reply]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for statement, reply in zip(statements, replies, strict=True):
            self._rows.setdefault(statement.label, []).extend(reply.rows)

    def rows_of(self, template: bytes) -> Sequence[Row]:
        return self._rows.get(template.decode(), ())


class AssertionFailedError(StorageError):
    """The condition of an assertion did not hold; the server did not run the statements after it."""


class _Cursor(Cursor):
    async def _show_warnings(self, conn: object) -> None:
        """Overrides the driver, which would spend a round trip on logging them; in strict mode problems are errors."""


def is_from_server(error: StorageConflictError) -> bool:
    """Whether the server rolled a transaction back. Otherwise Edda found that another process came first."""
    return isinstance(error.__cause__, MySQLError)


def _refuse_group_replication(settings: Mapping[str, str]) -> None:
    if settings.get("group_replication_single_primary_mode") == "OFF" and settings.get("group_replication_group_name"):
        raise StorageError(
            "this server belongs to a MySQL group in multi-primary mode, in which row locks of one member are not seen "
            "by the others, so events could be lost; switch the group to single-primary mode (SELECT "
            "group_replication_switch_to_single_primary_mode()) and connect Edda to its primary, or use MariaDB Galera"
        )


class MySQLSession(PooledSession):
    """Sends statements over one connection. After anything but an answer of the server the session closes it, which
    rolls the transaction back."""

    version = ""
    limit = 0
    """Bytes that fit into one message."""
    node: int | None = None
    """The server's number if it is a node of a Galera cluster. Row locks then exclude transactions of the same node
    only. Of two transactions on different nodes that write the same row, the cluster refuses the later COMMIT
    (certification, error 1213). So a transaction that must exclude another one has to write a row, not only lock it."""

    def __init__(self, connection: Any, probe: StatementProbe | None, timeout: float | None) -> None:
        super().__init__()
        self.connection = connection
        self._probe = probe
        self._timeout = timeout

    async def set_up(self, setup: bytes) -> None:
        *_, about, cluster = await self._send(bind(setup + b"; " + CLUSTER))
        self.version, packet = about.rows[0]
        self.limit = packet - PACKET_MARGIN
        settings = {name.lower(): value for name, value in cluster.rows}
        _refuse_group_replication(settings)
        if settings.get("wsrep_on") == "ON":
            await self.run(SYNC_WAIT)
            self.node = int(settings["auto_increment_offset"])  # the cluster gives each node its own offset

    @property
    def is_usable(self) -> bool:
        transport = getattr(self.connection, "_transport", None)
        return transport is not None and not transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Connected, and outside of any transaction."""
        return self.is_usable and self.connection.get_autocommit() and not self.connection.get_transaction_status()

    async def run(self, template: bytes, *values: Value) -> Reply:
        return (await self._send(bind(template, *values)))[-1]

    async def send(self, *statements: Statement) -> list[Reply]:
        """In as few messages as possible; one reply for each statement."""
        # On a cluster each statement is a message of its own: on MariaDB 10.11 another node's commit can abort a
        # transaction between two statements of one message without an error, and the rest of the message then runs as
        # transactions of their own.
        messages = pack_messages(statements, self.limit) if self.node is None else statements
        return [reply for message in messages for reply in await self._send(message)]

    async def query(self, *statements: Statement) -> ReplyRows:
        return ReplyRows(statements, await self.send(*statements))

    async def _send(self, message: Statement) -> list[Reply]:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._exchange(message.label, message.body)
        except MySQLError as error:
            if faults.number_of(error) == _WRONG_VALUE:
                raise AssertionFailedError(str(error)) from error
            failure = faults.translate(error)
            if isinstance(failure, StorageUnavailableError):
                self.close_now()
            raise failure from error
        except StorageError:
            self.close_now()
            raise
        except Exception as error:
            # A time-out, or any error that the driver raises when its connection is cut: the outcome is unknown.
            self.close_now()
            raise StorageUnavailableError(f"no answer from the database: {error!r}") from error
        except BaseException:  # cancelled in the middle of a statement
            self.close_now()
            raise

    async def execute(self, label: str, sql: str, values: Mapping[str, Any]) -> Reply:
        """A statement of the user, without a time-out and with the driver's own errors."""
        try:
            return (await self._exchange(label, sql, dict(values)))[-1]
        except MySQLError as error:
            # The server has answered, except for the client's own numbers: it lost the connection.
            if faults.number_of(error) <= 0 or faults.number_of(error) in range(2000, 3000):
                self.close_now()
            raise
        except BaseException:
            self.close_now()
            raise

    async def _exchange(self, label: str, body: str | bytes, values: dict[str, Any] | None = None) -> list[Reply]:
        if self._probe:
            self._probe.before(label)
        cursor = self.connection.cursor(_Cursor)
        await cursor.execute(body, values)
        replies = [Reply(cursor.rowcount, await cursor.fetchall())]
        while await cursor.nextset():
            replies.append(Reply(cursor.rowcount, await cursor.fetchall()))
        if self._probe:
            self._probe.after(label)
        return replies

    async def rollback(self) -> None:
        """After an error. If the ROLLBACK fails, the session is closed, which rolls back as well."""
        if self.is_usable:
            with suppress(StorageError):
                await self.run(ROLLBACK)

    def close_now(self) -> None:
        if transport := getattr(self.connection, "_transport", None):
            transport.abort()
        self.connection.close()

    async def close(self) -> None:
        # Best effort: if the server is gone, the driver raises one of many errors.
        with suppress(Exception):
            async with asyncio.timeout(1):
                await self.connection.ensure_closed()
        self.close_now()


CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as lost. A statement waits at most 5 seconds for a lock."""
JOURNAL_TIMEOUT = 10.0
"""The same for the journal, on whose one connection all runs of a worker wait. A batch waits at most a second for a
lock. After a time-out the journal sends the batch again, and finds by the fence's token whether it was committed."""
KNOWN_OPTIONS = frozenset({"charset", "ssl", "ssl_ca", "unix_socket"})


class MySQLConnectionFactory:
    """Makes sessions, and keeps a set of them so that `kill` can close all."""

    def __init__(self, url: str, probe: StatementProbe | None) -> None:
        self._arguments = arguments(url)
        self._probe = probe
        self._sessions: set[MySQLSession] = set()
        self._open = False
        self.is_certified = False
        """Whether the server is a node of a Galera cluster, as the newest session found it."""

    def open(self) -> None:
        self._open = True

    def kill(self) -> None:
        self._open = False
        for session in self._sessions:
            session.kill()
        self._sessions.clear()

    async def connect(self, timeout: float | None = ANSWER_TIMEOUT, setup: bytes = SETUP) -> MySQLSession:
        self._refuse_if_closed()
        connect: Callable[..., Awaitable[Any]] = asyncmy.connect
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                session = MySQLSession(await connect(**self._arguments), self._probe, timeout)
        except Exception as error:
            # Refused, timed out, half a handshake, bad password: the caller tries again after each of them.
            raise NotConnectedError(f"cannot connect to the database: {error!r}") from error
        # In the set before its first statement, so that a kill during it closes the session.
        self._sessions = {s for s in self._sessions if s.is_usable} | {session}
        self._refuse_if_closed(session)
        await session.set_up(setup)
        self.is_certified = session.node is not None
        return session

    def _refuse_if_closed(self, session: MySQLSession | None = None) -> None:
        if not self._open:
            if session:
                session.close_now()
            raise NotConnectedError("the storage is closed")


class MySQLPool(SessionPool[MySQLSession]):
    def __init__(
        self, factory: MySQLConnectionFactory, size: int, setup: bytes = SETUP, timeout: float = ANSWER_TIMEOUT
    ) -> None:
        super().__init__(lambda: factory.connect(timeout, setup), size)
        self._factory = factory

    @property
    def is_certified(self) -> bool:
        return self._factory.is_certified

    @asynccontextmanager
    async def session(self) -> AsyncIterator[MySQLSession]:
        """Rolls back after an error of the storage."""
        session = await self.acquire()
        try:
            yield session
        except StorageError:
            await session.rollback()
            raise
        except BaseException:
            session.close_now()
            raise
        finally:
            self.release(session)

    async def run(self, template: bytes, *values: Value) -> Reply:
        async with self.session() as session:
            return await session.run(template, *values)

    async def send(self, *statements: Statement) -> list[Reply]:
        async with self.session() as session:
            return await session.send(*statements)


def arguments(url: str) -> dict[str, Any]:
    """The arguments of the driver's connect(). They are never logged, because they include the password."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    refuse_unknown_options(options, KNOWN_OPTIONS, "MySQL and MariaDB")
    arguments: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.lstrip("/")),
        "charset": "utf8mb4",
        "autocommit": True,
    }
    options.pop("charset", None)
    if socket := options.pop("unix_socket", None):
        arguments["unix_socket"] = socket
    authority = options.pop("ssl_ca", None)
    if options.pop("ssl", "false").lower() in {"1", "true", "yes"} or authority:
        arguments["ssl"] = ssl.create_default_context(cafile=authority)
    return arguments
