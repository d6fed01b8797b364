"""A TCP proxy before a database server: the server can be made silent, be refused or lose its connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit


class DatabaseProxy:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port)
        self._parts = parts
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self._is_closed = False

    @property
    def url(self) -> str:
        netloc = f"{self._parts.username}@127.0.0.1:{self._port}"
        return self._parts._replace(netloc=netloc).geturl()

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        await self._close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()  # a task that was cancelled before its first step has not closed its connection

    def silence(self) -> None:
        """As a stopped server or a network that drops packets: connections are accepted, and nothing gets through."""
        self._flowing.clear()

    def strand(self) -> None:
        """As a firewall that forgets without a word: nothing gets through on the connections of now, ever. New ones are
        as good as any."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def refuse(self) -> None:
        """As a server that is down."""
        await self._close()
        self.cut()

    def cut(self) -> None:
        """As a restart, or a firewall that forgets: all connections are reset, and new ones are welcome."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def restore(self) -> None:
        """What was held back goes on: a server that was stopped works off what it was sent."""
        self._flowing.set()
        if self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # the connection was accepted before the server was closed
            writer.transport.abort()
            return
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer: asyncio.StreamWriter | None = None
        flowing = self._flowing
        try:
            await flowing.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers.add(far_writer)
            await asyncio.gather(self._pump(reader, far_writer, flowing), self._pump(far_reader, writer, flowing))
        except (OSError, asyncio.CancelledError):
            pass  # the proxy is closed; asyncio's streams would print it
        finally:
            for one in (writer, far_writer):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
