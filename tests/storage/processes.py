"""Other processes on the same SQLite file: each runs one of these coroutines and talks through a pipe."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from edda.core.model import RunId
from edda.errors import StorageUnavailableError
from edda.storage.ports import StatementProbe
from edda.storage.sqlite import SQLiteStorage
from edda.storage.sqlite.locks import close_write_lock, open_write_lock

from .probes import Listener
from .records import done, entry, new_run, run_write
from .worker import Worker

PATIENCE = 60.0

Work = Callable[..., Coroutine[Any, Any, None]]


@contextmanager
def process(work: Work, *args: object) -> Iterator[tuple[BaseProcess, Pipe]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=run, args=(work, theirs, *args), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        if child.pid and child.is_alive():
            child.kill()
        child.join(PATIENCE)
        ours.close()


def run(work: Work, pipe: Pipe, *args: object) -> None:
    asyncio.run(work(pipe, *args))


async def hear(pipe: Pipe) -> Any:
    assert await asyncio.to_thread(pipe.poll, PATIENCE), "the other process says nothing"
    return await asyncio.to_thread(pipe.recv)


def kill(child: BaseProcess) -> None:
    child.kill()
    child.join(PATIENCE)


async def opened(path: str, probe: StatementProbe | None = None) -> SQLiteStorage:
    storage = SQLiteStorage(path, probe=probe)
    await storage.open()
    await storage.migrate()
    return storage


async def own_a_run(pipe: Pipe, path: str, name: str) -> None:
    storage = await opened(path)
    worker = Worker(storage, name)
    await worker.register()
    await worker.write(new_run(f"run-of-{name}", entry(1)))
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)


class StopBeforeCommit(Listener):
    """Reports through the pipe and stays inside the transaction, with the file's write lock held."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe = pipe
        self.armed = False

    def before(self, statement: str) -> None:
        if self.armed and statement == "COMMIT":
            self.pipe.send("in the middle")
            self.pipe.recv()


async def stop_in_a_transaction(pipe: Pipe, path: str) -> None:
    probe = StopBeforeCommit(pipe)
    storage = await opened(path, probe)
    worker = Worker(storage, "there")
    await worker.register()
    await worker.write(new_run("run-1", entry(1)))
    probe.armed = True
    await worker.write(run_write("run-1", entry(2)))


async def migrate_an_empty_file(pipe: Pipe, path: str) -> None:
    storage = SQLiteStorage(path)
    await storage.open()
    pipe.send(await storage.migrate())
    await storage.close()


async def write_until_one_has_enough(pipe: Pipe, path: str, name: str, enough: int) -> None:
    storage = await opened(path)
    worker = Worker(storage, name)
    await worker.register()
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    count = 0
    while count < enough and not exists(f"{path}.enough"):
        assert (
            await worker.write(*(new_run(f"{name}-{count}-{i}", entry(1), transition=done()) for i in range(10)))
            is not None
        )
        count += 1
    touch(f"{path}.enough")
    pipe.send(count)
    await storage.close()


async def write_to_both(pipe: Pipe, paths: tuple[str, str], name: str) -> None:
    storages = [await opened(path) for path in paths]
    workers = [Worker(storage, name) for storage in storages]
    for worker in workers:
        await worker.register()
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    for count in range(100):
        await asyncio.gather(*(worker.write(new_run(f"{name}-{count}", transition=done())) for worker in workers))
    pipe.send("done")
    for storage in storages:
        await storage.close()


async def use_it_in_a_forked_child(pipe: Pipe, path: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # the test is about forking beside threads
    storage = await opened(path)
    worker = Worker(storage, "parent")
    await worker.register()
    lock = open_write_lock(f"{path}.lock")
    with lock:
        child = os.fork()
        if child == 0:
            pipe.send((await refusal(storage), can_lock(f"{path}.lock"), can_lock(f"{path}.worker-parent")))
            os._exit(0)
        wait_for(child)
    close_write_lock(lock)
    await storage.close()


async def refusal(storage: SQLiteStorage) -> str:
    try:
        await storage.get(RunId("run-1"))
    except StorageUnavailableError as error:
        return str(error)
    return "none"


async def try_locks(pipe: Pipe, *files: str) -> None:
    pipe.send([can_lock(file) for file in files])


def can_lock(file: str) -> bool:
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


async def others_can_lock(*files: str) -> list[bool]:
    with process(try_locks, *files) as (_, pipe):
        answer: list[bool] = await hear(pipe)
        return answer


def exists(file: str) -> bool:
    return os.path.exists(file)


def touch(file: str) -> None:
    Path(file).touch()


def wait_for(child: int) -> None:
    os.waitpid(child, 0)
