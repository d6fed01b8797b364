"""Notifications: a process that waits is woken by another one."""

from __future__ import annotations

import asyncio

from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import start

TIMEOUT = 60.0
"""Far longer than any storage's polling pause: a wait that ends sooner was woken by a notification."""


async def keep_telling(teller: Storage, listener: asyncio.Task[None], name: str) -> None:
    """A commit and `notify`, repeatedly: the listener may not be listening yet."""
    for number in range(200):
        await teller.start([start(f"{name}-{number}")])
        await teller.notify()
        await asyncio.wait([listener], timeout=0.05)
        if listener.done():
            return
    raise AssertionError("nobody heard")


async def test_an_announcement_wakes_another_process(storage: Storage, make_storage: MakeStorage) -> None:
    other = await make_storage()
    for turn in range(3):
        listener = asyncio.create_task(storage.wait_for_notification(TIMEOUT))
        await keep_telling(other, listener, f"run-{turn}")
        await listener


async def test_an_announcement_wakes_its_own_process(storage: Storage) -> None:
    listener = asyncio.create_task(storage.wait_for_notification(TIMEOUT))
    await keep_telling(storage, listener, "run")
    await listener


async def test_a_wait_without_notifications_ends_by_itself(storage: Storage) -> None:
    await asyncio.wait_for(storage.wait_for_notification(0.05), TIMEOUT)


async def test_a_wait_for_notifications_may_be_given_up(storage: Storage, make_storage: MakeStorage) -> None:
    listener = asyncio.create_task(storage.wait_for_notification(TIMEOUT))
    await asyncio.wait([listener], timeout=0.05)
    listener.cancel()
    await asyncio.wait([listener])
    again = asyncio.create_task(storage.wait_for_notification(TIMEOUT))
    await keep_telling(await make_storage(), again, "run")
    await again
