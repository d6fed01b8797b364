"""Searches without an index read only the newest runs, and return how far back they went."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from edda.control import run_search
from edda.control.run_search import RunSearcher
from edda.control.views import RunSearch
from edda.core.codec import Codec
from edda.core.model import RunId, Start
from edda.core.redact import Redaction
from edda.core.states import RunStatus
from edda.errors import ArgumentError
from edda.storage.memory.storage import MemoryStorage

SECOND = 1_000_000
EARLIER = datetime.fromtimestamp(5, UTC)


@pytest.fixture
async def finder(monkeypatch: pytest.MonkeyPatch) -> RunSearcher:
    """Of the runs order-0 to order-9, a second apart, of which it searches four."""
    monkeypatch.setattr(run_search, "TEXT_SCAN_LIMIT", 4)
    monkeypatch.setattr(run_search, "INPUT_SCAN_LIMIT", 4)
    storage, codec = MemoryStorage(), Codec()
    await storage.open()
    inputs = {n: codec.encode({"even": n % 2 == 0, "number": n}) for n in range(10)}
    await storage.start([Start(RunId(f"order-{n}"), "shop", input, n * SECOND) for n, input in inputs.items()])
    return RunSearcher(storage, codec, Redaction(["iban"]))


async def names(finder: RunSearcher, search: RunSearch) -> list[str]:
    return [run.run_id for run in (await finder.find(search)).runs]


async def test_text_is_searched_in_the_newest_ids(finder: RunSearcher) -> None:
    found = await finder.find(RunSearch(q="ORDER"))
    assert [run.run_id for run in found.runs] == ["order-9", "order-8", "order-7", "order-6"]
    assert found.searched_to == 5 * SECOND
    assert await finder.count(RunSearch(q="order")) == {RunStatus.RUNNING: 4}


async def test_pages_of_one_search_end_at_the_scan_limit_of_the_first(finder: RunSearcher) -> None:
    first = await finder.find(RunSearch(q="order", limit=3))
    second = await finder.find(RunSearch(q="order", limit=3, cursor=run_search.write_cursor(first.after)))
    assert [run.run_id for run in second.runs] == ["order-6"]
    assert second.after is None
    assert first.searched_to == second.searched_to == 5 * SECOND


async def test_a_whole_id_is_found_at_any_age(finder: RunSearcher) -> None:
    assert await names(finder, RunSearch(q="order-1")) == ["order-1"]


async def test_older_ids_are_searched_by_asking_for_an_earlier_time(finder: RunSearcher) -> None:
    found = await finder.find(RunSearch(q="order", until=EARLIER))
    assert [run.run_id for run in found.runs] == ["order-4", "order-3", "order-2", "order-1"]
    assert found.searched_to == 0


async def test_a_complete_search_has_no_scan_limit(finder: RunSearcher) -> None:
    assert (
        await finder.find(RunSearch(q="order", since=EARLIER, until=datetime.fromtimestamp(8, UTC)))
    ).searched_to is None
    assert (await finder.find(RunSearch())).searched_to is None


async def test_inputs_are_searched_in_the_newest_runs_and_then_further_back(finder: RunSearcher) -> None:
    first = await finder.find(RunSearch(input=("number=3",)))
    assert first.runs == []
    assert first.searched_to == 5 * SECOND
    second = await finder.find(RunSearch(input=("number=3",), cursor=run_search.write_cursor(first.after)))
    assert [run.run_id for run in second.runs] == ["order-3"]
    third = await finder.find(RunSearch(input=("number=3",), until=datetime.fromtimestamp(5.000001, UTC)))
    assert [run.run_id for run in third.runs] == ["order-3"]


async def test_a_bulk_action_acts_on_the_runs_that_it_counted(finder: RunSearcher) -> None:
    search = RunSearch(input=("even=true",))
    for reach in (3, 6, 100):
        counted = sum((await finder.count(search, reach)).values())
        assert counted == len([run async for run in finder.iterate(search, reach)]) > 0


@pytest.mark.parametrize(
    "condition",
    [
        "password=hunter2",
        "customer.password=hunter2",
        "password.first=h",
        "iban=DE1",
        "customer.IBAN=DE1",
        'customer={"iban": "DE1"}',
        'orders=[{"card": {"api_key": "x"}}]',
        "API-Key=x",
    ],
)
async def test_redacted_fields_cannot_be_searched(finder: RunSearcher, condition: str) -> None:
    """Or whoever may look could find it out by asking."""
    for search in (finder.find, finder.count):
        with pytest.raises(ArgumentError, match="is redacted") as refusal:
            await search(RunSearch(input=(condition,)))
        assert "hunter2" not in str(refusal.value)
        assert "DE1" not in str(refusal.value)
