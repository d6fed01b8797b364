"""Where PostgreSQL is and how connections to it are made.

Every connection comes from `PostgresTarget.connect`: those of the storage's own pools, of `ctx.transaction()` and of
the engine behind `ctx.session`. So the hosts, the options of the URL, the settings and what is known of a pooler are
the same for all of them.

A pooler that gives a client another server connection for each transaction (PgBouncer's transaction mode, and others
like it) is recognised by the process number that it tells its clients, which is not that of the server's process.
Behind one, three things differ. A statement is prepared and executed in one transaction, unnamed (`PooledConnection`),
because between two transactions the prepared statement stays behind on a server connection that other clients use.
Settings are sent with each BEGIN, because as start-up parameters they are refused or dropped. LISTEN is not used.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any
from urllib.parse import urlencode

import asyncpg

from edda.errors import NotConnectedError, StorageError
from edda.storage.shared.url_options import refuse_unknown_options, split_options

from .connection import PooledConnection, PostgresConnection, SharedConnection, connect

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
STATEMENT_CACHE_SIZE = 100
MAX_POOLER_CHECKS = 3

_DRIVER_OPTIONS = frozenset(
    {
        *("host", "port", "dbname", "database", "user", "password", "passfile", "service", "target_session_attrs"),
        *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version", "krbsrvname", "gsslib"),
    }
)
_SERVER_SETTINGS = frozenset(
    {
        *("application_name", "search_path", "timezone", "role", "client_encoding", "synchronous_commit", "work_mem"),
        *("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "tcp_user_timeout"),
        *("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"),
    }
)
_OWN_OPTIONS = frozenset(
    {
        *("ssl", "options", "connect_timeout", "pooler", "pgbouncer"),
        *("statement_cache_size", "prepared_statement_cache_size"),
    }
)
KNOWN_OPTIONS = _DRIVER_OPTIONS | _SERVER_SETTINGS | _OWN_OPTIONS

_COMMAND_LINE_SETTING = re.compile(r"(?:-c\s*|--)([\w.]+)=((?:\\.|\S)*)\s*")
_BACKENDS_OWN = "SELECT 1 WHERE pg_backend_pid() = {pid}"
"""Sent as a simple query: one server connection answers it, and the status has the number of rows."""
_NOT_IN_FORCE = {"default_transaction_isolation": None, "default_transaction_read_only": "transaction_read_only"}
"""The name of a default's setting inside a transaction; BEGIN sets the isolation level."""


class Pooling(StrEnum):
    """The pooler in front of the server."""

    AUTO = "auto"
    """Each new connection finds it out."""
    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"


class PostgresTarget:
    def __init__(self, url: str, statement_cache_size: int | None = None) -> None:
        self.url = url
        bare, given = split_options(url)
        refuse_unknown_options((name for name in given if "." not in name), KNOWN_OPTIONS, "PostgreSQL")
        # Several hosts as SQLAlchemy writes them: host=a:1&host=b:2.
        options = {name: ",".join(values) if name in {"host", "port"} else values[-1] for name, values in given.items()}
        self.pooling = _read_pooling(options)
        self.cache_size = _read_cache_size(options, statement_cache_size)
        self._timeout = _read_number(options, "connect_timeout", CONNECT_TIMEOUT)
        if ssl := options.pop("ssl", None):
            options["sslmode"] = {"true": "require", "1": "require", "false": "disable", "0": "disable"}.get(ssl, ssl)
        self._settings = _read_options(options.pop("options", ""))
        self._settings |= {name: value for name, value in options.items() if name not in _DRIVER_OPTIONS}
        driver = {name: value for name, value in options.items() if name in _DRIVER_OPTIONS}
        scheme, _, place = bare.partition("://")
        self._dsn = f"{scheme.partition('+')[0]}://{place}" + (f"?{urlencode(driver)}" if driver else "")

    @property
    def is_pooled(self) -> bool:
        """Whether consecutive transactions of one connection may run on different server connections."""
        return self.pooling is Pooling.TRANSACTION

    async def connect(
        self, settings: Mapping[str, str], *, answer_within: float | None = None, is_shared: bool = False
    ) -> PostgresConnection:
        """`settings` are set on the connection; `is_shared` is for connections that the user's code works on."""
        settings = self._merge(settings, is_shared)
        kind = SharedConnection if is_shared else PostgresConnection
        if self.pooling in {Pooling.AUTO, Pooling.NONE}:
            connection = await self._connect_direct(settings, answer_within, kind)
            if connection is not None:
                return connection
        name = {"application_name": settings["application_name"]}
        if self.pooling is Pooling.SESSION:
            return await self._connect_session(name, settings, answer_within, kind)
        pooled: PooledConnection = await self._open(name, answer_within, PooledConnection, 0)
        names = {name: _NOT_IN_FORCE.get(name, name) for name in settings if name != "application_name"}
        pooled.opening = _set_all({inner: settings[name] for name, inner in names.items() if inner}, is_local=True)
        return pooled

    async def _connect_direct(
        self, settings: Mapping[str, str], answer_within: float | None, kind: type[PostgresConnection]
    ) -> PostgresConnection | None:
        """None if a pooler was found."""
        # Not at start-up: asyncpg would take the server for a read-only one, and target_session_attrs would refuse it.
        at_start = {name: value for name, value in settings.items() if name != "default_transaction_read_only"}
        try:
            connection: PostgresConnection = await self._open(at_start, answer_within, kind, self.cache_size)
        except asyncpg.PostgresError as error:
            if self.pooling is Pooling.AUTO and "startup parameter" in str(error):
                self._expect_pooler(str(error))
                return None
            raise
        try:
            if self.pooling is Pooling.AUTO and not await _is_direct(connection):
                self._expect_pooler("the server's process is not the one that answered first")
                connection.terminate()
                return None
            if len(at_start) < len(settings):
                await connection.execute(
                    f"SET default_transaction_read_only = {settings['default_transaction_read_only']}"
                )
        except BaseException:  # even a cancel: a connection that no caller holds must not stay open
            connection.terminate()
            raise
        return connection

    async def _connect_session(
        self,
        name: Mapping[str, str],
        settings: Mapping[str, str],
        answer_within: float | None,
        kind: type[PostgresConnection],
    ) -> PostgresConnection:
        connection: PostgresConnection = await self._open(name, answer_within, kind, self.cache_size)
        connection.session_settings = _set_all(settings, is_local=False)
        try:
            await connection.execute(connection.session_settings)
        except BaseException:  # as above
            connection.terminate()
            raise
        return connection

    async def _open(
        self, settings: Mapping[str, str], answer_within: float | None, kind: type[PostgresConnection], cache_size: int
    ) -> Any:
        return await connect(
            self._dsn,
            timeout=self._timeout,
            command_timeout=answer_within,
            statement_cache_size=cache_size,
            server_settings=settings,
            connection_class=kind,
        )

    def _merge(self, ours: Mapping[str, str], is_shared: bool) -> dict[str, str]:
        """The user's settings come first on the user's connections; on others only what Edda does not set."""
        if is_shared:
            return {**ours, **self._settings}
        name = self._settings.get("application_name", ours["application_name"])
        return {**self._settings, **ours, "application_name": name}

    def _expect_pooler(self, reason: str) -> None:
        if self.pooling is not Pooling.TRANSACTION:
            self.pooling = Pooling.TRANSACTION
            logger.info(
                "postgres storage: a connection pooler is in front of the server (%s); statements are not prepared "
                "across transactions, LISTEN is not used, and work of other processes is found by polling; "
                "if it pools by session, add ?pooler=session to the database URL",
                reason,
            )

    def expect_foreign_statements(self, error: object) -> None:
        """The server did not know a prepared statement, so a pooler that was not recognised shares server
        connections."""
        if self.pooling is not Pooling.TRANSACTION:
            self.pooling = Pooling.AUTO  # the URL's value was wrong
            self._expect_pooler(str(error).partition("\n")[0])

    async def check_pooler(self, settings: Mapping[str, str]) -> None:
        """Refuse a pooler that cannot work, before it is used."""
        checks = {Pooling.TRANSACTION: self._refuse_statement_mode, Pooling.SESSION: self._refuse_shared_backends}
        try:
            async with asyncio.timeout(self._timeout):
                if check := checks.get(self.pooling):
                    # PgBouncer closes a client's connection if it gives it a server connection that another client has
                    # broken, so a lost connection is no answer.
                    for _ in range(MAX_POOLER_CHECKS - 1):
                        with suppress(asyncpg.ConnectionDoesNotExistError):
                            return await check(settings)
                    await check(settings)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # TimeoutError is an OSError
            raise NotConnectedError(f"no answer through the pooler in front of PostgreSQL: {error!r}") from error

    async def _refuse_statement_mode(self, settings: Mapping[str, str]) -> None:
        connection = await self.connect(settings)
        try:
            await connection.execute("BEGIN")
            await connection.execute("ROLLBACK")
        except asyncpg.PostgresError as error:
            if "statement pooling" not in str(error):
                raise
            raise StorageError(
                "the connection pooler in front of PostgreSQL pools by statement and allows no transactions: "
                "set pool_mode = transaction (or session) for this database in pgbouncer.ini, or connect to the server"
            ) from error
        finally:
            connection.terminate()

    async def _refuse_shared_backends(self, settings: Mapping[str, str]) -> None:
        first = await self.connect(settings)
        try:
            before = await _backend_of(first)
            second = await self.connect(settings)
            try:
                backends = {before, await _backend_of(first)}
                is_shared = len(backends) > 1 or await _backend_of(second) in backends
            finally:
                second.terminate()
        finally:
            first.terminate()
        if is_shared:
            raise StorageError(
                "the database URL says pooler=session, but two connections share one server connection: "
                "set pool_mode = session in the pooler, or remove pooler=session from the URL"
            )


async def _is_direct(connection: PostgresConnection) -> bool:
    # With a limit: a pooler keeps a client waiting until one of its server connections is free.
    question = _BACKENDS_OWN.format(pid=connection.get_server_pid())
    status = await connection.execute(question, timeout=CONNECT_TIMEOUT)
    return status == "SELECT 1"


async def _backend_of(connection: PostgresConnection) -> int:
    async with connection.transaction():
        pid: int = await connection.fetchval("SELECT pg_backend_pid()")
    return pid


def _set_all(settings: Mapping[str, str], *, is_local: bool) -> str:
    calls = (f"set_config({_quoted(name)}, {_quoted(value)}, {is_local})" for name, value in settings.items())
    return f"SELECT {', '.join(calls)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _read_pooling(options: dict[str, str]) -> Pooling:
    given = options.pop("pooler", Pooling.AUTO)
    # As in the URLs of Prisma and Supabase.
    if options.pop("pgbouncer", "false").lower() in {"true", "1"}:
        given = Pooling.TRANSACTION
    try:
        return Pooling(given)
    except ValueError:
        raise ValueError(f"db_url: pooler is one of {', '.join(Pooling)}, not {given!r}") from None


def _read_cache_size(options: dict[str, str], argument: int | None) -> int:
    sizes = [int(_read_number(options, name, -1)) for name in ("statement_cache_size", "prepared_statement_cache_size")]
    given = [size for size in sizes if size >= 0]
    return min(given, default=STATEMENT_CACHE_SIZE) if argument is None else argument


def _read_number(options: dict[str, str], name: str, default: float) -> float:
    given = options.pop(name, None)
    if given is None:
        return default
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"db_url: {name} is a number, not {given!r}") from None


def _read_options(given: str) -> dict[str, str]:
    """`-c name=value`, as libpq sends it at start-up; a pooler would drop it there."""
    settings: dict[str, str] = {}
    rest = given.strip()
    while rest:
        if (found := _COMMAND_LINE_SETTING.match(rest)) is None:
            raise ValueError("db_url: options is written '-c name=value -c name=value'")
        settings[found[1]] = re.sub(r"\\(.)", r"\1", found[2])
        rest = rest[found.end() :]
    return settings
