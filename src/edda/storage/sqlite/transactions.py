"""A transaction that the user's code and Edda share, on a connection and a thread of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from edda.errors import StorageConflictError, StorageUnavailableError
from edda.storage.ports import Dialect

from .connection import Connection
from .threads import HeldTransaction, HeldTransactions

T = TypeVar("T")
_Values = Sequence[Any] | Mapping[str, Any]


class SQLiteJoint:
    dialect: Dialect = "sqlite"
    is_certified = False

    def __init__(self, tenure: HeldTransaction) -> None:
        self._tenure = tenure
        self.connection = TransactionConnection(tenure)

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def has_begun(self) -> bool:
        return True

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        return await self.connection.execute(sql, values)

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return await self.connection.fetch(sql, values)

    async def commit(self) -> None:
        try:
            await self._tenure.submit(_commit)
        finally:
            await self._tenure.end()

    async def rollback(self) -> None:
        """Does nothing if it is over already."""
        try:
            if not self._tenure.is_over:
                await self._tenure.submit(_roll_back)
        finally:
            await self._tenure.end()


async def begin(tenures: HeldTransactions, holder: str) -> SQLiteJoint:
    return SQLiteJoint(await tenures.begin(lambda db: db.run("BEGIN IMMEDIATE"), holder))


class TransactionConnection:
    """The user's side of it: everything is done by the transaction's own thread, one after the other.

    Values are a sequence for `?` or a mapping for `:name`. While it is open nobody else writes to the file, so what
    writes through Edda (starting a workflow, sending an event) would wait for this very transaction; a database in
    memory cannot even be read by others.
    """

    def __init__(self, tenure: HeldTransaction) -> None:
        self._tenure = tenure

    @property
    def raw(self) -> sqlite3.Connection:
        """For code that needs the driver's own. Its calls block: see `run`."""
        return self._tenure.db.lend_to_user()

    async def run(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Have something done with the driver's own connection, in the transaction's thread."""
        return await self._tenure.submit(_inside(lambda db: act(db.lend_to_user())))

    async def execute(self, sql: str, values: _Values = ()) -> int:
        """How many rows it touched."""
        return await self._tenure.submit(_inside(lambda db: db.run(sql, values)))

    async def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        await self._tenure.submit(_inside(lambda db: db.run_many(sql, rows)))

    async def fetch(self, sql: str, values: _Values = ()) -> list[tuple[Any, ...]]:
        return await self._tenure.submit(_inside(lambda db: db.rows(sql, values)))

    async def fetchone(self, sql: str, values: _Values = ()) -> tuple[Any, ...] | None:
        return next(iter(await self.fetch(sql, values)), None)


def _inside(act: Callable[[Connection], T]) -> Callable[[Connection], T]:
    """After some errors SQLite rolls back by itself: what came then would be committed alone, and at once."""

    def checked(db: Connection) -> T:
        if not db.in_transaction:
            raise StorageConflictError("the transaction is no longer open: SQLite has rolled it back")
        return act(db)

    return checked


@_inside
def _commit(db: Connection) -> None:
    try:
        db.run("COMMIT")
    except sqlite3.IntegrityError:  # a constraint that is looked at last: it is open still, and goes with its turn
        raise
    except sqlite3.Error as error:
        db.reset()
        raise StorageUnavailableError(str(error)) from error


def _roll_back(db: Connection) -> None:
    try:
        if db.in_transaction:
            db.run("ROLLBACK")
    except sqlite3.Error:  # a closed connection has none
        db.reset()
