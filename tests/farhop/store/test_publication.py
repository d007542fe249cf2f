"""The loop that keeps a key alive, against a store that fails exactly when told to."""

import asyncio
from random import Random

import pytest

from farhop.store.contract import StoreError, StoreUnreachable
from farhop.store.publication import LeasedPublication

TTL_S = 0.06


class Script:
    """Leases that record every word, and fail for the words listed in `broken`."""

    def __init__(self):
        self.calls = []
        self.broken = set()
        self.leases = set()
        self.values = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.ended = []

    async def _called(self, word):
        self.calls.append(word)
        await self.gate.wait()
        if word in self.broken:
            raise StoreUnreachable(f"scripted: {word}")

    async def grant(self, ttl_s):
        await self._called("grant")
        lease = self.calls.count("grant")
        self.leases.add(lease)
        return lease

    async def keep_alive(self, lease):
        await self._called("keep_alive")
        return lease in self.leases

    async def put_leased(self, key, value, lease):
        await self._called("put")
        if lease not in self.leases:
            return False
        self.values[key] = (value, lease)
        return True

    async def revoke(self, lease):
        await self._called("revoke")
        self.leases.discard(lease)

    async def until(self, condition):
        async with asyncio.timeout(60.0):
            while not condition():
                await asyncio.sleep(0)


def publication(script, ttl_s=TTL_S):
    return LeasedPublication(script, "/k", b"1", ttl_s, Random(1), script.ended.append)


async def test_the_first_value_goes_out_under_a_lease_and_is_refreshed():
    script = Script()
    made = publication(script)
    assert await made.start()
    assert script.values == {"/k": (b"1", 1)}
    await script.until(lambda: script.calls.count("keep_alive") >= 3)
    assert script.calls[:2] == ["grant", "put"]
    assert set(script.calls[2:]) == {"keep_alive"}
    await made.withdraw()
    assert script.leases == set()
    assert script.ended == [made]


async def test_a_lost_lease_is_replaced_and_the_last_value_written_again():
    script = Script()
    made = publication(script)
    await made.start()
    await made.update(b"2")
    script.leases.clear()
    script.values.clear()
    await script.until(lambda: script.values == {"/k": (b"2", 2)})
    await made.withdraw()


async def test_a_lease_lost_between_refreshes_is_noticed_by_the_write():
    script = Script()
    made = publication(script, ttl_s=60)
    await made.start()
    script.leases.clear()
    assert not await made.update(b"2")
    assert "lease was lost" in made.trouble
    await script.until(lambda: script.values == {"/k": (b"2", 2)})
    await script.until(lambda: made.trouble is None)
    await made.withdraw()


@pytest.mark.parametrize("word", ["grant", "put", "keep_alive"])
async def test_any_call_may_fail_and_the_newest_value_comes_through(word):
    script = Script()
    made = publication(script)
    if word == "keep_alive":
        assert await made.start()
        script.broken.add(word)
        await script.until(lambda: made.trouble is not None)
    else:
        script.broken.add(word)
        assert not await made.start()
    assert word in made.trouble
    for number in range(100):
        assert not await made.update(b"%d" % number)
    script.broken.clear()
    await script.until(lambda: script.values.get("/k", (b"", 0))[0] == b"99" and made.trouble is None)
    assert await made.update(b"done")
    # A hundred updates in an outage are one write after it.
    assert script.calls.count("put") < 30
    await made.withdraw()


async def test_an_update_during_a_write_is_written_after_it():
    script = Script()
    made = publication(script)
    await made.start()
    script.gate.clear()
    first = asyncio.create_task(made.update(b"2"))
    await script.until(lambda: script.calls[-1] == "put")
    second = asyncio.create_task(made.update(b"3"))
    await asyncio.sleep(0)
    assert not first.done()
    assert not second.done()
    script.gate.set()
    assert await first
    assert await second
    assert script.values["/k"][0] == b"3"
    await made.withdraw()


async def test_withdrawing_during_a_write_answers_the_writer():
    script = Script()
    made = publication(script)
    await made.start()
    script.gate.clear()
    writer = asyncio.create_task(made.update(b"2"))
    await script.until(lambda: script.calls[-1] == "put")
    leaving = asyncio.create_task(made.withdraw())
    assert not await writer
    script.gate.set()
    await leaving
    assert script.leases == set()


async def test_a_withdrawal_that_cannot_be_written_leaves_a_log_line():
    script = Script()
    made = publication(script)
    await made.start()
    script.broken.add("revoke")
    await made.withdraw()
    assert "goes with its lease" in made.trouble


async def test_nothing_is_published_after_withdrawal():
    script = Script()
    made = publication(script)
    await made.start()
    await made.withdraw()
    with pytest.raises(StoreError, match="withdrawn"):
        await made.update(b"2")


def test_a_lease_must_last():
    with pytest.raises(ValueError, match="ttl_s"):
        LeasedPublication(None, "/k", b"", 0, Random(1), print)
