"""Failover, measured live under load: real processes, two hubs of real etcds, and the bounds that the docs state."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import PIPE
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from failover import (
    STALL_S,
    STEADY,
    Load,
    Looks,
    Stalls,
    TimedRequest,
    bias,
    figure,
    hindrance,
    hubs_of,
    last_attempt,
    settings,
)  # fmt: skip

from farhop.store.contract import LAW_KEY
from farhop_lab.world.client import answer
from farhop_lab.world.etcd import find_binary
from tests.conftest import RunningWorld, further

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL = frozenset(("virginia", "frankfurt", "tokyo"))
FAR = {"virginia", "frankfurt"}
# A drawn region must lose to others for the penalty of its return (300 ms) but win without it, 228 ms away.
DRAW_MS = -300.0
KEEP_MS = -1_000.0  # wins though it pays the penalty, and whatever wait a busy machine estimates
HANGS_S = 60.0  # the bounds apply without the share of the cores that other processes took
WORKERS = [["virginia", "frankfurt"]] * 3 + [["frankfurt", "virginia"]] * 3


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorld]:
    """A world of two hubs. A test that breaks a part mends it before it ends."""
    folder = tmp_path_factory.mktemp("failover")
    made = RunningWorld(settings(folder), folder / "world")
    try:
        made.call(made.world.start())
        yield made
    finally:
        made.close()


async def drawn(failing: RunningWorld, load: Load) -> None:
    """Until Tokyo serves what comes in afar."""
    await bias(failing.world, "tokyo", DRAW_MS)
    began = time.time()
    for region in FAR:
        async with asyncio.timeout(60.0):
            while not any(a.region == "tokyo" and a.begun > began and a.result and
                          a.result.entry == failing.entry(region) for a in load.asked):  # fmt: skip
                await asyncio.sleep(0.02)


def test_a_region_killed_under_load(failing: RunningWorld) -> None:
    """All of its processes at once: no request is lost that had not begun, and it is back at a pace."""
    world = failing.world
    tokyo = world.regions["tokyo"]

    async def drill() -> None:
        own = [["tokyo", "virginia"]] * 2
        async with Load(world, WORKERS + own) as load, Looks(world, FAR) as looks:
            await drawn(failing, load)
            assert tokyo.regional is not None
            assert tokyo.global_ is not None
            t0 = time.time()
            await asyncio.gather(*(child.kill() for child in (tokyo.regional, tokyo.global_, *tokyo.engines)))
            await looks.until("tokyo", "down", t0)  # a region that was only suspect comes back unpaced
            last, elsewhere = await last_attempt(world, "tokyo", t0) - t0, load.first_from(FAR, t0)
            last -= looks.hindered(t0, t0 + last)
            await asyncio.gather(world.start_engines("tokyo"), world.start_balancers("tokyo"))
            back, hindered = time.time(), hindrance(world, ALL)
            again = await load.until_from("tokyo", back, HANGS_S) - back - hindered()
            await asyncio.sleep(1.0)
            shares = looks.shares("tokyo", "virginia", t0)
        assert elsewhere is not None
        figure("region killed", last_attempt=last, first_byte_elsewhere=elsewhere - t0, back_in_use=again)
        assert load.lost() == []
        assert last <= 1.0
        assert again <= 5.0
        assert any(0.0 < share < 1.0 for share in shares), shares  # at a pace, not all at once

    failing.call(drill())
    failing.call(world.wait_until_serving(ALL))


@pytest.mark.long
def test_a_region_behind_a_black_hole(failing: RunningWorld) -> None:
    """What is sent there vanishes and nothing closes; it goes on reporting to the hubs."""
    world = failing.world
    assert world.network is not None

    async def drill() -> None:
        assert world.network is not None
        async with Load(world, WORKERS) as load, Looks(world, FAR) as looks:
            await drawn(failing, load)
            t0 = time.time()
            world.network.blackhole("tokyo")
            await asyncio.sleep(4.0)
            last, elsewhere = await last_attempt(world, "tokyo", t0) - t0, load.first_from(FAR, t0)
            last -= looks.hindered(t0, t0 + last)
            states = looks.states(t0)
            world.network.heal("tokyo")
            healed, hindered = time.time(), hindrance(world, ALL)
            again = await load.until_from("tokyo", healed, HANGS_S) - healed - hindered()
        assert elsewhere is not None
        slowest = max((a.first or a.begun) - a.begun for a in load.asked if a.begun < t0 + 4.0)
        figure("region behind a black hole", last_attempt=last, first_byte_elsewhere=elsewhere - t0,
               slowest_first_byte=slowest, back_in_use=again)  # fmt: skip
        assert load.lost() == []
        assert all(a.begun < t0 for a in load.asked if a.result is not None and not a.result.ok)
        assert last <= 2.0
        assert again <= 5.0
        assert {("virginia", "up"), ("frankfurt", "up")} == {one for one in states if one[0] != "tokyo"}

    try:
        failing.call(drill())
    finally:
        world.network.heal("tokyo")
    failing.call(world.wait_until_serving(ALL))


async def break_etcd(world: Any, how: str) -> float:
    """In every hub at once, for longer than a report may be old; how long it lasted, in seconds."""
    hubs = list(world.hubs.values())
    began = time.time()
    if how == "killed":
        await asyncio.gather(*(hub.kill() for hub in hubs))
        await asyncio.sleep(3.5)
        await asyncio.gather(*(hub.start() for hub in hubs))
    elif how == "paused":
        for hub in hubs:
            hub.pause()
        await asyncio.sleep(3.5)
        for hub in hubs:
            hub.resume()
    elif how == "wiped":
        await asyncio.gather(*(hub.restart(wipe=True) for hub in hubs))
    elif how == "compacted":
        await asyncio.gather(*(hub.compact() for hub in hubs))
    else:
        before = await world.hubs["atlantic"].leader()
        assert await world.hubs["atlantic"].move_leader() != before
    return time.time() - began


@pytest.mark.parametrize(
    "how", further(["killed", "paused", "compacted", "its leader moved", "wiped"], "killed", "its leader moved")
)
def test_no_request_fails_whatever_happens_to_etcd(failing: RunningWorld, how: str) -> None:
    """No client fails, no report is missed, and on a machine that lets processes run no region is seen to flap.

    What etcd can do to a region's standing is to keep its reports away. A channel whose pings are late says something
    of this machine only, where that is known to have stood still meanwhile; and requests go by it.
    """
    world = failing.world

    async def drill() -> None:
        await at_home(failing)
        homes = [["frankfurt"], ["tokyo"]] * 2
        async with Load(world, homes, STEADY) as load, Looks(world, set(ALL)) as looks, Stalls() as stalls:
            t0 = time.time()
            lasted = await break_etcd(world, how)
            mended = time.time()
            await in_contact(world)
            contact = time.time() - mended
            async with asyncio.timeout(60.0):
                while sum(a.begun >= t0 and a.result is not None for a in load.asked) <= 10:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
        figure(f"every etcd {how}", outage=lasted, in_contact_again=contact, most_stalled=stalls.most_s)
        assert load.failed() == []
        since = [a for a in load.asked if a.begun >= t0]
        against = looks.against(t0)
        # Without etcd, reports come by the channel alone: if pings were late, for lack of a core, neither arrives.
        assert [why for why in against if "no recent report" in why and "channel broken" not in why] == []
        if stalls.most_s <= STALL_S:
            astray = [first for a in since if (first := await first_choice(world, a)) is not None]
            assert (astray, against) == ([], [])

    failing.call(bias(world, "tokyo", 0.0))
    failing.call(drill())


async def first_choice(world: Any, asked: TimedRequest) -> str | None:
    """Where a request was first sent, if that was not where it came in: None if it was.

    One that its own region turned away for want of time, on a busy machine, had chosen well all the same.
    """
    assert asked.result is not None
    home = next(run for run in world.regions.values() if run.entry == asked.result.entry)
    if asked.region == home.name:
        return None
    decision = asked.result.headers["x-farhop-decision"]
    async with aiohttp.ClientSession() as session, session.get(f"{home.global_admin}/decisions/{decision}") as page:
        document = await page.json()
    first = str(document["attempts"][0]["target"])
    return None if first == home.name else f"{first}: {document}"


async def at_home(failing: RunningWorld) -> None:
    """Until requests of the steady tenant are served where they come in: what came back is eased in."""
    async with asyncio.timeout(60.0):
        for region in ("frankfurt", "tokyo"):
            inside = 0
            while inside < 10:
                result = await one(failing, region, "at home?", STEADY)
                inside = inside + 1 if result.headers.get("x-farhop-region") == region else 0
                await asyncio.sleep(0.0 if inside else 0.1)


async def in_contact(world: Any) -> None:
    """Until every global balancer is in contact with every hub."""
    async with asyncio.timeout(60.0), aiohttp.ClientSession() as session:
        for run in world.regions.values():
            while True:
                async with session.get(f"{run.global_admin}/status") as page:
                    hubs = (await page.json())["hubs"]
                if len(hubs) == 2 and all(hub["in_contact"] and hub["balancers"] == 3 for hub in hubs):
                    break
                await asyncio.sleep(0.1)


async def one(failing: RunningWorld, region: str, text: str, tenant: str) -> Any:
    body = {"model": failing.world.settings.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return await answer([failing.entry(region)], f"sk-farhop-{tenant}", body)


@pytest.mark.long
def test_one_hub_down_is_reported_and_no_request_fails(failing: RunningWorld) -> None:
    """And an operator's word said meanwhile reaches everybody by the other hub."""
    world = failing.world

    async def drill() -> None:
        await at_home(failing)
        async with Load(world, [[name] for name in sorted(ALL)]) as load:
            world.hubs["pacific"].pause()
            try:
                await asyncio.sleep(2.5)
                async with aiohttp.ClientSession() as session:
                    async with session.get(f"{world.regions['tokyo'].global_admin}/status") as page:
                        status = await page.json()
                    async with session.get(f"{world.regions['tokyo'].regional_admin}/status") as page:
                        own = await page.json()
                found = time.time()
                await drawn(failing, load)
                took = time.time() - found
            finally:
                world.hubs["pacific"].resume()
            await in_contact(world)
            await bias(world, "tokyo", 0.0)
        figure("one hub paused", word_heeded=took)
        assert load.failed() == []
        seen = {hub["hub"]: hub["in_contact"] for hub in status["hubs"]}
        assert seen == {"atlantic": True, "pacific": False}
        assert status["store_trouble"].startswith("hub pacific: ")
        assert {hub["hub"] for hub in own["hubs"] if hub["trouble"] is not None} == {"pacific"}

    failing.call(drill())


async def offer(admin: str, body: dict[str, Any], what: str) -> float:
    """What a global balancer would say of Frankfurt, were this asked of it now."""
    question = {"tenant": "anywhere", "body": body}
    async with aiohttp.ClientSession() as session, session.post(f"{admin}/explain", json=question) as page:
        document = await page.json()
    assert page.status == 200, document
    return float(next(c[what] for c in document["reasons"]["candidates"] if c["region"] == "frankfurt"))


def test_a_global_balancer_killed_leaves_others_that_know_the_caches(failing: RunningWorld) -> None:
    """A talk that went through Frankfurt's goes on through Virginia's, to the replica that holds it."""
    world = failing.world
    frankfurt = world.regions["frankfurt"]
    talk = "A long talk that only Frankfurt's balancer has carried so far. " * 120

    body = {"model": world.settings.model, "messages": [{"role": "user", "content": talk}], "max_tokens": 4}

    async def served(text: str) -> str:
        asked = body | {"messages": [{"role": "user", "content": text}]}
        return (await answer([frankfurt.entry], "sk-farhop-anywhere", asked)).headers["x-farhop-region"]

    async def drill() -> None:
        await bias(world, "tokyo", 0.0)  # an earlier drill's
        await at_home(failing)
        admins = [world.regions[name].global_admin for name in ("virginia", "frankfurt")]
        cold = await offer(admins[0], body, "hit_tokens")
        await bias(world, "frankfurt", KEEP_MS)
        async with asyncio.timeout(60.0):
            while not all([await offer(admin, body, "bias_ms") for admin in admins]):
                await asyncio.sleep(0.1)
        async with asyncio.timeout(30.0):  # it came back recently and is eased in: it may not take such a long one
            inside = 0
            while inside < 3:
                inside = inside + 1 if await served(f"{inside} {talk}") == "frankfurt" else 0
        assert await served(talk) == "frankfurt"
        async with asyncio.timeout(60.0):
            while (warm := await offer(admins[0], body, "hit_tokens")) <= cold:
                await asyncio.sleep(0.1)
        assert frankfurt.global_ is not None
        async with Load(world, [["frankfurt", "virginia"]] * 2 + [["virginia"]] * 2) as load:
            await asyncio.sleep(0.5)
            t0 = time.time()
            await frankfurt.global_.kill()
            result = await answer([frankfurt.entry, failing.entry("virginia")], "sk-farhop-anywhere", body)
            took = time.time() - t0
            await asyncio.sleep(1.0)
        assert result.usage is not None
        figure("a global balancer killed", next_answer=took)
        print(f"failover: predicted elsewhere {warm:.0f} tokens (before it was sent {cold:.0f}),"
              f" cached in truth {result.usage.cached_tokens} of {result.usage.prompt_tokens}")  # fmt: skip
        assert result.headers["x-farhop-region"] == "frankfurt"
        assert load.lost() == []
        assert warm >= 0.8 * (result.usage.cached_tokens or 0) > 0
        assert (result.usage.cached_tokens or 0) >= 0.8 * result.usage.prompt_tokens

    assert frankfurt.global_ is not None
    try:
        failing.call(drill())
    finally:
        failing.call(frankfurt.global_.kill())
        failing.call(bias(world, "frankfurt", 0.0))
        failing.call(world.start_global("frankfurt"))
        failing.call(world.wait_until_serving(ALL))


async def law_of_epoch(world: Any, epoch: int) -> None:
    """The world's own law under a later epoch, in every hub, as `farhop law set` writes it; until all go by it."""
    document = {
        "epoch": epoch, "author": "drills", "why": f"epoch {epoch}", "at": datetime.now(UTC).isoformat(),
        "tenants": world.document["tenants"], "models": world.document.get("models", []),
    }  # fmt: skip
    async with hubs_of(world) as store:
        await store.put(LAW_KEY, msgspec.json.encode(document))
    async with asyncio.timeout(60.0):
        while await epochs(world) != {epoch}:
            await asyncio.sleep(0.05)


async def epochs(world: Any) -> set[int]:
    """Of the laws that balancers go by."""
    found = set()
    async with aiohttp.ClientSession() as session:
        for run in world.regions.values():
            for admin in (run.global_admin, run.regional_admin):
                async with session.get(f"{admin}/status") as page:
                    found.add((await page.json())["law_epoch"])
    return found


async def etcdctl(member: Any, *arguments: str) -> str:
    ran = await asyncio.create_subprocess_exec(
        str(find_binary().parent / "etcdctl"), *arguments, stdout=PIPE, stderr=PIPE,
        env={"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": member.endpoint},
    )  # fmt: skip
    output, wrong = await ran.communicate()
    assert ran.returncode == 0, wrong.decode()
    return output.decode()


def test_an_etcd_restored_from_a_backup_undoes_no_law(failing: RunningWorld, tmp_path: Path) -> None:
    """As deploy/etcd/README.md says it: a snapshot, later laws, everything wiped, the snapshot restored.

    Balancers go on all the while, keep the later law, tell that the hub's is older, and give it theirs.
    """
    world = failing.world
    (member,) = world.hubs["pacific"].members
    snapshot, data = tmp_path / "pacific.db", member.data_folder()

    async def restored() -> None:
        await member.forget(wipe=True)
        await etcdctl(
            member, "snapshot", "restore", str(snapshot), "--data-dir", str(data), "--name", member.name,
            "--initial-cluster", f"{member.name}={member.peer_url}",
            "--initial-advertise-peer-urls", member.peer_url,
        )  # fmt: skip
        await member.start()

    async def drill() -> None:
        first = max(await epochs(world)) + 1
        await law_of_epoch(world, first)
        await etcdctl(member, "snapshot", "save", str(snapshot))
        await law_of_epoch(world, first + 1)
        await at_home(failing)
        seen: set[int] = set()
        async with Load(world, [[name] for name in sorted(ALL)]) as load, aiohttp.ClientSession() as session:
            await restored()
            async with asyncio.timeout(60.0):
                while f'"why":"epoch {first + 1}"' not in await etcdctl(member, "get", LAW_KEY):
                    seen |= await epochs(world)
                    await asyncio.sleep(0.1)
            await in_contact(world)
            seen |= await epochs(world)
            noticed = 0.0  # by the first balancer that sees it: the others find it repaired
            for run in world.regions.values():
                for admin in (run.global_admin, run.regional_admin):
                    async with session.get(f"{admin}/metrics") as page:
                        lines = (await page.text()).splitlines()
                    noticed += sum(float(line.rpartition(" ")[2]) for line in lines if 'reason="law_older"' in line)
        assert load.failed() == []
        assert seen == {first + 1}
        assert noticed >= 1.0

    failing.call(bias(world, "tokyo", 0.0))
    failing.call(drill())
