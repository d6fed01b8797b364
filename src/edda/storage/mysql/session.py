"""One connection: every statement goes through `Session.send`, and a session in doubt is thrown away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError

from edda.errors import StorageConflictError, StorageError, StorageUnavailableError
from edda.storage.ports import StatementProbe

from . import faults
from .statement import DERIVED_ROWS, Statement, Value, bind, join_values, pack_messages

SQL_MODE = b"STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"

# The comments are code: the first for MariaDB only, the second for MySQL only. A client that stops inside a
# transaction must not hold its locks for ever; MySQL has no time-out for that, only one for idle connections.
# A long IN list must stay a range of the primary key: MariaDB would turn it into a join, in another lock order.
SETUP = (
    b"SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    b"SET SESSION autocommit = 1, sql_notes = 0, time_zone = '+00:00', innodb_lock_wait_timeout = 5, "
    b"sql_mode = '%b' /*M! , idle_transaction_timeout = 5, in_predicate_conversion_threshold = 0 */"
    b"/*!80000 , wait_timeout = 60 */; "
    b"SELECT VERSION(), @@max_allowed_packet" % SQL_MODE
)
# A locked row holds up all that is in the batch: what waits for it is soon sent apart from the rest.
JOURNAL_SETUP = SETUP.replace(b"innodb_lock_wait_timeout = 5", b"innodb_lock_wait_timeout = 1")

# Asked at every connect: a server may have been restarted as a node of a cluster since the connection before.
CLUSTER = b"""SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'auto_increment_offset',
    'group_replication_single_primary_mode', 'group_replication_group_name')"""
# A node of Galera commits before the others have applied the commit. With this, the first statement of every
# transaction waits until its node has applied all that the cluster had committed when the statement came in.
SYNC_WAIT = b"SET SESSION wsrep_sync_wait = 7"

BEGIN = b"START TRANSACTION"
COMMIT = b"COMMIT"
ROLLBACK = b"ROLLBACK"


def assertion(condition: bytes) -> bytes:
    """The server skips the rest of a message after an error. A mode that does not exist is the one error that both
    servers raise on a condition without a stored program, and it touches no row."""
    return b"SET SESSION sql_mode = IF(%b, '%b', 'expectation missed')" % (condition, SQL_MODE)


ASSERT_ROW_COUNT = assertion(b"ROW_COUNT() = %b")


def join_all_rows(template: bytes, selects: Sequence[bytes]) -> Iterator[Statement]:
    """Each row must hit one."""
    for i in range(0, len(selects), DERIVED_ROWS):
        some = selects[i : i + DERIVED_ROWS]
        yield from join_values(template, some)
        yield bind(ASSERT_ROW_COUNT, len(some))


PACKET_MARGIN = 4_096
"""Bytes of a packet left to the protocol and to the short statements around a long one."""

_EXPECTATION_MISSED = 1231
Row = tuple[Any, ...]


class Reply(NamedTuple):
    affected: int
    rows: Sequence[Row]


class ReplyRows:
    """The rows that came back, by the template that asked for them."""

    def __init__(self, statements: Iterable[Statement], replies: Iterable[Reply]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for statement, reply in zip(statements, replies, strict=True):
            self._rows.setdefault(statement.label, []).extend(reply.rows)

    def rows_of(self, template: bytes) -> Sequence[Row]:
        return self._rows.get(template.decode(), ())


class AssertionFailedError(StorageError):
    """What was expected is not so; the statements behind it did not run."""


class _Cursor(Cursor):
    async def _show_warnings(self, conn: object) -> None:
        """The driver would spend a round trip on logging them; in strict mode what matters is an error."""


def _translate(error: MySQLError) -> StorageError:
    if faults.number_of(error) == _EXPECTATION_MISSED:
        return AssertionFailedError(str(error))
    return faults.translate(error)


def is_from_server(error: StorageConflictError) -> bool:
    """The server rolled a transaction back, rather than Edda finding that another process came first."""
    return isinstance(error.__cause__, MySQLError)


def _refuse_group_replication(settings: Mapping[str, str]) -> None:
    if settings.get("group_replication_single_primary_mode") == "OFF" and settings.get("group_replication_group_name"):
        raise StorageError(
            "this server belongs to a MySQL group in multi-primary mode, in which row locks of one member are not seen "
            "by the others, so events could be lost; switch the group to single-primary mode (SELECT "
            "group_replication_switch_to_single_primary_mode()) and connect Edda to its primary, or use MariaDB Galera"
        )


def _is_answer(error: MySQLError) -> bool:
    """Numbers from 2000 to 2999 are the client's own: it has lost its connection, or its thread."""
    number = faults.number_of(error)
    return number > 0 and not 2000 <= number < 3000


class Session:
    """After anything but a clear answer from the server it is dead, and so is its transaction."""

    version = ""
    limit = 0
    """Bytes that fit into one message."""
    node: int | None = None
    """The server's number if it is a node of a Galera cluster. Row locks are then seen by transactions of the same node
    alone; what transactions of all nodes see is a row that both write: the later of the two COMMITs is refused
    (certification, error 1213). So what excludes another transaction has to be written, not only locked."""

    def __init__(self, connection: Any, probe: StatementProbe | None, patience: float | None) -> None:
        self.connection = connection
        self._probe = probe
        self._patience = patience
        self._loop = asyncio.get_running_loop()

    async def set_up(self, setup: bytes) -> None:
        *_, about, cluster = await self._send(bind(setup + b"; " + CLUSTER))
        self.version, packet = about.rows[0]
        self.limit = packet - PACKET_MARGIN
        settings = {name.lower(): value for name, value in cluster.rows}
        _refuse_group_replication(settings)
        if settings.get("wsrep_on") == "ON":
            await self.run(SYNC_WAIT)
            self.node = int(settings["auto_increment_offset"])  # the cluster numbers its nodes with it

    @property
    def alive(self) -> bool:
        transport = getattr(self.connection, "_transport", None)
        return transport is not None and not transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Alive, and outside of any transaction."""
        return self.alive and self.connection.get_autocommit() and not self.connection.get_transaction_status()

    async def run(self, template: bytes, *values: Value) -> Reply:
        return (await self._send(bind(template, *values)))[-1]

    async def send(self, *statements: Statement) -> list[Reply]:
        """In one message, or as few as it takes; one reply for each statement."""
        replies = []
        for message in self._messages(statements):
            replies += await self._send(message)
        return replies

    def _messages(self, statements: Sequence[Statement]) -> Iterable[Statement]:
        """To a node of a cluster each by itself. On MariaDB 10.11 another node's commit can abort a transaction between
        two statements of one message without an error, and the others then run as transactions of their own."""
        return pack_messages(statements, self.limit) if self.node is None else statements

    async def query(self, *statements: Statement) -> ReplyRows:
        return ReplyRows(statements, await self.send(*statements))

    async def _send(self, message: Statement) -> list[Reply]:
        try:
            async with asyncio.timeout(self._patience):
                return await self._exchange(message.label, message.body)
        except MySQLError as error:
            failure = _translate(error)
            if isinstance(failure, StorageUnavailableError):
                self.close_now()
            raise failure from error
        except StorageError:
            self.close_now()
            raise
        except Exception as error:
            # Time-outs, and whatever a driver raises when its connection is cut under it: the outcome is unknown.
            self.close_now()
            raise StorageUnavailableError(f"no answer from the database: {error!r}") from error
        except BaseException:  # cancelled in mid-statement, or a simulated death
            self.close_now()
            raise

    async def execute(self, label: str, sql: str, values: Mapping[str, Any]) -> Reply:
        """A statement of the user's, for as long as it takes, with the driver's own errors; after all but an answer
        of the server the session is dead."""
        try:
            return (await self._exchange(label, sql, dict(values)))[-1]
        except MySQLError as error:
            if not _is_answer(error):
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
        """After an error; a session that cannot even do this is dead, which rolls back as well."""
        if self.alive:
            with suppress(StorageError):
                await self.run(ROLLBACK)

    def close_now(self) -> None:
        """Drop the connection without a goodbye, and without what is still in its buffers."""
        if transport := getattr(self.connection, "_transport", None):
            transport.abort()
        self.connection.close()

    def close_threadsafe(self) -> None:
        """Transports belong to their loop, and a heartbeat's loop runs in a thread of its own."""
        if _running_loop() is self._loop:
            self.close_now()
            return
        with suppress(RuntimeError):  # that loop is closed, and its connections with it
            self._loop.call_soon_threadsafe(self.close_now)

    async def close(self) -> None:
        # Best effort: a server that is gone needs no goodbye, and the driver has many ways to say so.
        with suppress(Exception):
            async with asyncio.timeout(1):
                await self.connection.ensure_closed()
        self.close_now()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
