from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from inprocess import HOP, HOP_KEY, until

from farhop.balance import outcome
from farhop.balance.estimate.estimates import Estimates
from farhop.balance.health.replica import HealthConfig
from farhop.balance.machine import Event
from farhop_lab.world.ports import free_ports
from regional_lb.app.config import RegionalConfig
from regional_lb.engines import members, watch
from regional_lb.engines.config import ReplicaConfig
from regional_lb.engines.watch import ReplicaWatcher
from regional_lb.fleet.replicas import Replicas
from regional_lb.fleet.view import ReplicaProbed, ReplicaSampled, Sample, View, ViewSwapped

PAGES = Path(__file__).parent / "signals" / "pages"
PAGE = (PAGES / "vllm.txt").read_text()


def page(waiting: str = "0", running: str = "0", more: str = "") -> str:
    return f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n{more}"


# -- the watcher, on real sockets

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(
    metrics: Answering | web.Application, health: Answering | None = None, port: int = 0
) -> AsyncIterator[str]:
    async def alive(_request: web.Request) -> web.Response:
        return web.Response()

    app = metrics if isinstance(metrics, web.Application) else web.Application()
    if not isinstance(metrics, web.Application):
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/health", health or alive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Recorded:
    """What the flow would be told, in a fleet as the flow has one."""

    def __init__(self) -> None:
        self.replicas = Replicas(HealthConfig(), Estimates())
        self.views = 0
        self.answers = False  # whether requests are answered all the time
        self.probes: list[tuple[str, bool]] = []
        self.faults: list[str] = []
        self.ready: list[bool] = []
        self.strains: list[str] = []
        self.samples: list[Sample] = []
        self.refused: list[str] = []
        self.said: list[tuple[str, str]] = []
        self.in_flight: dict[str, int] = {}
        self.ruled = True  # whether the law has rules of models
        self.watcher: ReplicaWatcher

    def probed(self, name: str) -> int:
        return sum(one == name for one, _ in self.probes)

    @property
    def view(self) -> View:
        return self.replicas.view

    def react(self, event: Event) -> None:
        if isinstance(event, ViewSwapped):
            self.views += 1
            self.replicas.adopt(event.view)
        elif isinstance(event, ReplicaSampled):
            self.samples.append(event.sample)
            self.replicas.handle(event, 0.0)
        elif isinstance(event, ReplicaProbed):
            self.probes.append((event.target, event.ok))
            self.faults.append(event.fault)
            self.ready.append(event.ready)
            self.strains.append(event.strain)
            self.replicas.handle(event, 0.0)

    def waiting(self, name: str) -> int | None:
        sample = self.view.replicas[name].sample if name in self.view.replicas else None
        return sample.waiting if sample is not None else None


@asynccontextmanager
async def watching(
    monkeypatch: pytest.MonkeyPatch,
    urls: dict[str, str],
    text: dict[str, Any] | None = None,
    speed: float = 1.0,
    *,
    top: dict[str, Any] | None = None,
    **more: float,
) -> AsyncIterator[Recorded]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    config = RegionalConfig.model_validate({
        "region": "virginia", "instance": "r1", "admin": {"port": 0}, "tier": {"port": 0}, "control": {"port": 0},
        "hop": HOP, "watch": {"probe_s": 0.02, "scrape_s": 0.02, "timeout_s": 1.0, **more},
        "replicas": [
            {"url": url, "models": ["m"], "name": name, "kv_tokens": 77, **(text or {})} for name, url in urls.items()
        ],
        "health": {"gpu_temperature_c_max": 90},
        **(top or {}),
    })  # fmt: skip
    found, loop = Recorded(), asyncio.get_running_loop()
    watcher = found.watcher = ReplicaWatcher(
        config, react=found.react, refused=found.refused.append, clock=lambda: loop.time() * speed, rng=Random(1),
        answered_at=lambda _name: loop.time() * speed if found.answers else -inf,
        in_flight=lambda name: found.in_flight.get(name, 0),
        models_ruled=lambda: found.ruled,
        warn=lambda name, problem, _what: found.said.append((name, problem)),
    )  # fmt: skip
    await watcher.open()
    try:
        yield found
    finally:
        await watcher.close()
        assert len(watcher._tasks) == 0


def _text(body: str | bytes, **more: Any) -> Answering:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body.encode() if isinstance(body, str) else body, **more)

    return answer


async def test_a_replica_becomes_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(_text(PAGE)) as url, watching(monkeypatch, {"one": url}) as found:
        assert found.view.replicas["one"].sample is None  # the view is there at once
        assert found.view.by_model["m"] == ("one",)
        await until(lambda: found.waiting("one") == 3 and found.probes)
        assert found.view.replicas["one"].kv_tokens == 432_000
        assert found.probes[0] == ("one", True)
        assert found.refused == []
        assert found.views == 1  # a sample renews one entry: the number of other replicas costs nothing


async def test_an_idle_replica_is_scraped_less_often_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = [PAGE]

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=page[0].encode())

    async with served(answer) as url, watching(monkeypatch, {"one": url}) as found:
        one = found.watcher._observed["one"]
        await until(lambda: one.at_rest)
        found.in_flight["one"] = 1
        await until(lambda: not one.at_rest)
        found.in_flight.clear()
        await until(lambda: one.at_rest)
        page[0] = "no metrics page"
        await until(lambda: not one.at_rest)
        probes = len(found.probes)
        await until(lambda: len(found.probes) > probes)


async def test_a_page_that_comes_in_many_pieces_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pages are hundreds of kilobytes: the first piece alone would be a page without its last metrics."""
    noise = "".join(f'vllm:some_bucket{{le="{n}"}} {n}\n' for n in range(20_000))

    async def slowly(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in ("vllm:num_requests_running 2\n", noise, "vllm:num_requests_wai", "ting 4", "2\n"):
            await answer.write(piece.encode())
            await asyncio.sleep(0.01)
        return answer

    async with served(slowly) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: found.waiting("one") is not None)
        assert found.waiting("one") == 42
        assert found.refused == []


@pytest.mark.parametrize(
    ("body", "answer", "reason"),
    [
        (b"<html>Sign in</html>\n", {}, "missing"),
        (PAGE.encode(), {"content_type": "text/html", "charset": "utf-8"}, "type"),
        (b'[{"iter": 1}]', {"content_type": "application/json"}, "type"),
        (b"\xff\xfe" * 10, {}, "cut"),
        (PAGE.encode()[:-1], {}, "cut"),
        (PAGE.encode(), {"status": 500}, "status"),
        (b"", {"status": 404}, "status"),
        (page(waiting="-1").encode(), {}, "value"),
        (page(waiting="{").encode(), {}, "value"),
        (page(waiting="\nvllm:num_requests_waiting{").encode(), {}, "line"),
    ],
)
async def test_a_page_that_cannot_be_read_is_refused_and_counted(
    monkeypatch: pytest.MonkeyPatch, body: bytes, answer: dict[str, Any], reason: str
) -> None:
    async with served(_text(body, **answer)) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: len(found.refused) >= 2 and len(found.probes) >= 2)
        assert set(found.refused) == {f"metrics_{reason}"}
        assert found.waiting("one") is None
        assert found.view.replicas["one"].kv_tokens == 77
        assert found.probes[-1] == ("one", True)  # whether it is alive is a separate question


async def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to what would look alive, nor to a page."""

    def away(to: str) -> Answering:
        async def answer(_request: web.Request) -> web.Response:
            raise web.HTTPFound(to)

        return answer

    async with served(_text(PAGE), away("/metrics")) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: found.probes)
        assert found.probes[0] == ("one", False)
    async with (
        served(_text(PAGE)) as other,
        served(away(f"{other}/metrics")) as url,
        watching(monkeypatch, {"one": url}) as found,
    ):
        await until(lambda: found.refused)
        assert found.waiting("one") is None


async def test_a_slow_replica_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        served(never, never) as slow,
        served(_text(PAGE)) as quick,
        watching(monkeypatch, {"slow": slow, "quick": quick}, timeout_s=5.0) as found,
    ):
        await until(lambda: found.probes.count(("quick", True)) >= 5 and found.waiting("quick") == 3)
        assert found.waiting("slow") is None
        assert not [name for name, _ in found.probes if name == "slow"]


async def test_a_probe_fails_without_an_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with served(_text(PAGE)) as gone:
        pass
    async with (
        served(never, never) as slow,
        watching(monkeypatch, {"gone": gone, "slow": slow}, timeout_s=0.1) as found,
    ):
        await until(lambda: ("gone", False) in found.probes and ("slow", False) in found.probes)
        await until(lambda: {"metrics_timeout", "metrics_unreachable"} <= set(found.refused))
        assert found.samples == []


async def test_a_slow_page_leaves_the_last_good_sample_to_age(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = False

    async def sometimes(_request: web.Request) -> web.Response:
        if hang:
            await asyncio.Event().wait()
        return web.Response(text=PAGE)

    async with served(sometimes) as url, watching(monkeypatch, {"one": url}, timeout_s=0.05) as found:
        await until(lambda: found.waiting("one") == 3)
        hang = True
        await until(lambda: found.refused.count("metrics_timeout") >= 3)
        last = found.view.replicas["one"].sample
        assert last == found.samples[-1]
        assert asyncio.get_running_loop().time() - last.at > 0.05  # type: ignore[union-attr]
        hang = False
        found.samples.clear()
        await until(lambda: found.samples)


async def test_an_engine_is_looked_for_where_it_has_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """`engine` says the paths, `metrics` says the place where it is another."""
    asked: list[str] = []

    async def anything(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text=(PAGES / "triton-trtllm.txt").read_text())

    app = web.Application()
    app.router.add_get("/{tail:.*}", anything)
    async with served(app) as url:
        fields = {"engine": "triton", "metrics": f"{url}/elsewhere"}
        async with watching(monkeypatch, {"one": url}, fields) as found:
            await until(lambda: found.waiting("one") == 7 and found.probes)
        assert set(asked) == {"/v2/health/ready", "/elsewhere", "/v1/models", "/v2/models/m/config"}
        asked.clear()
        async with watching(monkeypatch, {"one": url}, {"engine": "trtllm"}) as found:
            await until(lambda: found.refused and found.probes)
            assert set(found.refused) == {"metrics_missing"}  # it reports as another engine
        assert set(asked) == {"/health", "/prometheus/metrics", "/v1/models"}


async def test_a_replica_on_a_broken_gpu_is_out_until_that_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [(PAGES / "dcgm.txt").read_text()]

    async def exporter(_request: web.Request) -> web.Response:
        return web.Response(text=pages[0])

    async with (
        served(_text(PAGE)) as url,
        served(exporter) as dcgm,
        watching(monkeypatch, {"one": url}, {"dcgm": f"{dcgm}/metrics"}, gpus_s=0.02) as text,
    ):
        await until(lambda: text.faults and text.faults[-1] == "GPU 1: XID 79, fell off the bus")
        assert text.strains[-1] == "GPU 1: 92 °C, above 90"
        pages[0] = pages[0].replace("} 79\n", "} 0\n")
        await until(lambda: text.faults[-1] == "")


class Model:
    """An engine whose health page and completions answer as told."""

    def __init__(self) -> None:
        self.health, self.completions, self.hangs, self.asked = 200, 200, False, 0
        self.works, self.steps = False, 0
        self.app = web.Application()
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_post("/v1/completions", self._complete)

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.steps += self.works
        return web.Response(text=page("9", "4", f"vllm:kv_cache_usage_perc {self.steps % 1000 / 1000}\n"))

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _complete(self, _request: web.Request) -> web.Response:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.completions)


async def test_an_engine_that_loads_is_alive_and_takes_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.health = 503
    async with served(model.app) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: len(found.probes) >= 5)
        assert set(found.probes) == {("one", True)}
        assert not any(found.ready)
        assert found.replicas.health["one"].read(0.0).why == "alive, not ready"
        model.health = 200
        await until(lambda: found.ready[-1] and len(found.replicas.able("m", 0.0)) == 1)


async def test_an_engine_that_sleeps_behind_a_green_health_page_takes_no_work_until_it_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    awake = [1]

    async def metrics(_request: web.Request) -> web.Response:
        state = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake[0]}\n'
        return web.Response(text=page(more=state))

    async with served(metrics) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: found.ready and found.ready[-1] and len(found.samples) >= 2)
        for state in (0, 1):
            awake[0] = state
            await until(lambda: found.ready[-1] is bool(awake[0]))
            found.ready.clear()
            await until(lambda: len(found.ready) >= 3)
            assert set(found.ready) == {bool(state)}
            assert {ok for _, ok in found.probes} == {True}, "no failure"
            assert len(found.watcher.problems("one")) == 1 - state


async def test_a_replica_is_warmed_up_before_its_first_work_and_again_after_it_was_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    model.completions = 500
    async with served(model.app) as url, watching(monkeypatch, {"one": url}, {"probe": {"warmup": 3}}) as result:
        await until(lambda: model.asked >= 2)
        assert not len(result.replicas.able("m", 0.0))  # its health is green, and it does not serve requests
        assert ("one", False) in result.probes
        model.completions, before = 200, model.asked
        await until(lambda: len(result.replicas.able("m", 0.0)))
        assert model.asked - before >= 3
        warmed = model.asked
        found = len(result.probes)
        await until(lambda: len(result.probes) >= found + 5)
        assert model.asked == warmed
        model.health = 500
        await until(lambda: result.probes[-3:] == [("one", False)] * 3)
        model.health = 200
        await until(lambda: model.asked == warmed + 3)
        await until(lambda: result.ready[-1] and result.probes[-1] == ("one", True))


async def test_a_replica_that_cannot_run_a_completion_probe_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine for embeddings."""
    model = Model()
    model.completions = 404
    async with served(model.app) as url, watching(monkeypatch, {"one": url}, {"probe": {"warmup": 3}}) as found:
        await until(lambda: len(found.replicas.able("m", 0.0)))
        assert found.refused.count("generate_status") == model.asked == 1


async def test_a_hung_engine_behind_a_green_health_page_is_found_and_its_return_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    model.hangs = True
    found, speed = {"probe": {"generate_s": 1.0}}, 20.0
    monkeypatch.setattr(watch.ReplicaWatcher, "_pause", lambda _self, _seconds: asyncio.sleep(0.01))
    async with served(model.app) as url, watching(monkeypatch, {"one": url}, found, speed) as result:
        result.answers = True
        await until(lambda: len(result.probes) >= 15)
        assert model.asked == 0  # answers are evidence enough
        result.answers = False
        await until(lambda: "generates nothing" in result.faults[-1])
        assert not len(result.replicas.able("m", 0.0))
        assert result.probes[-1] == ("one", True)
        model.hangs = False
        await until(lambda: result.faults[-1] == "" and len(result.replicas.able("m", 0.0)))
        assert model.asked >= 2


async def test_an_engine_full_of_long_answers_is_no_hung_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer of its begins for long, and a token asked for waits behind them: its numbers show that it works."""
    model = Model()
    model.hangs = model.works = True
    monkeypatch.setattr(watch.ReplicaWatcher, "_pause", lambda _self, _seconds: asyncio.sleep(0.01))
    async with served(model.app) as url, watching(monkeypatch, {"one": url}, {"probe": {"generate_s": 1.0}}) as found:
        await until(lambda: model.asked >= 2)
        assert not any(found.faults)
        model.works = False
        await until(lambda: "generates nothing" in found.faults[-1])


async def test_a_replica_keeps_what_was_known_while_its_page_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [PAGE]

    async def changing(_request: web.Request) -> web.Response:
        return web.Response(text=pages[0])

    async with served(changing) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: found.waiting("one") == 3)
        known = found.view.replicas["one"]
        pages[0] = page(waiting="-1")
        await until(lambda: len(found.refused) >= 2)
        after = found.view.replicas["one"]
        assert after.kv_tokens == known.kv_tokens
        assert after.sample is not None
        pages[0] = page(waiting="9")
        await until(lambda: found.waiting("one") == 9)
        assert found.view.replicas["one"].kv_tokens == known.kv_tokens  # a page without it changes nothing


# -- replicas that come and go


def announced(url: str, name: str, **more: Any) -> ReplicaConfig:
    return ReplicaConfig.model_validate({"url": url, "name": name, "models": ["m"], **more})


async def test_new_replicas_are_watched_and_removed_ones_until_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(_text(PAGE)) as url, served(_text(PAGE)) as other, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: found.probed("one"))
        found.watcher.announce([announced(url, "one", kv_tokens=77), announced(other, "two")])
        await until(lambda: found.probed("two") and found.waiting("two") == 3)
        found.in_flight["one"] = 1
        found.watcher.announce([announced(other, "two")])
        assert found.view.replicas["one"].draining
        count = found.probed("one")
        await until(lambda: found.probed("one") >= count + 8)  # a working replica is watched, to the end
        assert set(found.view.replicas) == {"one", "two"}
        found.in_flight.clear()
        await until(lambda: set(found.view.replicas) == {"two"})
        gone = found.probed("one")
        count = found.probed("two")
        await until(lambda: found.probed("two") >= count + 5)
        assert found.probed("one") == gone
        await until(lambda: len(found.watcher._tasks) == 3)  # a probe, a scrape, its models: no task is lost
        views = found.views
        found.watcher.announce([announced(other, "two")])
        assert found.views == views  # the same list costs nothing


async def test_a_late_page_of_a_replaced_process_is_not_taken_for_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    held = asyncio.Event()

    async def later(_request: web.Request) -> web.Response:
        await held.wait()
        return web.Response(text=PAGE)

    async with (
        served(later, later) as old,
        served(_text(page(waiting="9"))) as new,
        watching(monkeypatch, {"one": old}, timeout_s=5.0) as found,
    ):
        found.watcher.announce([announced(new, "one")])
        held.set()
        await until(lambda: found.waiting("one") == 9)
        assert [sample.waiting for sample in found.samples if sample.waiting != 9] == []


def listing(*ids: str, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", **more} for name in ids]}


@asynccontextmanager
async def engine(
    models: list[Any], asked: list[str | None] | None = None, info: dict[str, Any] | None = None,
    health: Answering | None = None,
) -> AsyncIterator[str]:  # fmt: skip
    """`models[0]` is what it lists: a document, or a status, 0 if it breaks off. `info`: what its `/get_server_info`
    answers, if any."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if models[0] == 0:
            models[0], models[1] = models[1], models[0]
            begun = web.StreamResponse(headers={"content-length": "99"})
            await begun.prepare(request)
            await begun.write(b"{")
            assert request.transport is not None
            request.transport.close()
            return begun
        if asked is not None:
            asked.append(request.headers.get("authorization"))
        said = models[0]
        if models[1:] == [0]:
            models.reverse()
        return web.Response(status=said) if isinstance(said, int) else web.json_response(said)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    async def alive(_request: web.Request) -> web.Response:
        return web.Response()

    async def server_info(_request: web.Request) -> web.Response:
        return web.json_response(info, status=404 if info is None else 200)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    app.router.add_get("/get_server_info", server_info)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health or alive)
    async with served(app) as url:
        yield url


async def test_a_replica_answering_for_another_model_is_not_able_until_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: list[Any] = [listing("other")]
    async with engine(models) as url, watching(monkeypatch, {"one": url}, models_s=0.02) as found:
        await until(lambda: found.view.replicas["one"].missing == {"m"})
        assert found.view.by_model["m"] == ("one",)
        await until(lambda: found.said)
        assert found.said == [("one", "does not serve m: not in its /v1/models; correct `models`")]
        assert found.refused.count("models_other") == 1
        models[0] = 500  # no evidence: its last report stays valid
        await until(lambda: found.probed("one") >= 4)
        assert found.view.replicas["one"].missing == {"m"}
        models[0] = listing("served-name", root="m")
        await until(lambda: not found.view.replicas["one"].missing)


@pytest.mark.parametrize("says", [404, 401, {"data": []}, {"error": "no"}, listing("a", parent="m")])
async def test_a_listing_that_proves_nothing_leaves_a_replicas_models_as_configured(
    monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    async with engine([says]) as url, watching(monkeypatch, {"one": url}, models_s=0.02) as found:
        await until(lambda: found.probed("one") >= 4)
        assert found.view.replicas["one"].missing == frozenset()
        assert found.said == []


async def test_a_replica_gets_no_work_before_it_said_what_its_models_are_based_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So at its start, at another URL, and after it was down, when another process may have taken its place: until then
    the law's rule for a base bound nothing there."""
    models: list[Any] = [503]
    bases: list[Any] = []

    def noted(event: Event) -> None:
        if isinstance(event, ReplicaProbed) and event.ready:
            bases.append(found.view.replicas["one"].lineage["m"])

    unwell = False

    async def health(_request: web.Request) -> web.Response:
        return web.Response(status=500 if unwell else 200)

    async with engine(models, health=health) as url, watching(monkeypatch, {"one": url}) as found:
        react = found.watcher._react
        found.watcher._react = lambda event: (noted(event), react(event))[1]
        await until(lambda: found.probed("one") >= 4)
        assert not any(found.ready)
        for base in ("base", "another"):
            models[0] = listing("m", root=base)
            await until(lambda: len(bases) >= 3)
            assert set(bases) == {frozenset({base})}
            unwell = True
            await until(lambda: not found.probes[-1][1])
            bases.clear()
            unwell = False
        async with engine([listing("m", root="third")]) as other:
            found.watcher.announce([announced(other, "one")])
            bases.clear()
            await until(lambda: len(bases) >= 3)
            assert set(bases) == {frozenset({"third"})}


async def test_a_replica_that_never_says_what_it_serves_gets_work_unless_the_law_has_rules_of_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a proxy that knows no /v1/models, and answers with 503."""
    async with engine([503]) as url, watching(monkeypatch, {"one": url}) as found:
        found.ruled = False
        await until(lambda: any(found.ready))
        found.ruled = True
        await until(lambda: not found.ready[-1])
        assert any("/v1/models: status 503" in problem for problem in found.watcher.problems("one"))


async def test_a_process_in_the_place_of_another_gets_no_work_before_it_said_what_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took the port between two probes, all of which were good: seen only by its connections, or its counters."""
    models: list[Any] = [listing("m", root="first")]
    lines = set[asyncio.Transport]()
    seen = list[tuple[bool, Any]]()

    async def health(request: web.Request) -> web.Response:
        assert request.transport is not None
        lines.add(request.transport)
        return web.Response()

    async with engine(models, health=health) as url, watching(monkeypatch, {"one": url}, scrape_s=60.0) as found:
        react = found.watcher._react

        def noted(event: Event) -> None:
            react(event)
            if isinstance(event, ReplicaProbed):
                seen.append((event.ready, found.view.replicas["one"].lineage["m"]))

        found.watcher._react = noted
        await until(lambda: seen.count((True, {"first"})) >= 4)
        seen.clear()
        models[0] = listing("m", root="second")
        for line in lines:
            line.close()
        await until(lambda: (True, {"second"}) in seen)
        begun = next(n for n, (ready, _) in enumerate(seen) if not ready)
        assert (True, {"first"}) not in seen[begun:]
        models[0] = listing("m", root="third")
        seen.clear()
        found.watcher._replaced(found.watcher._observed["one"])  # as when its counters run backwards
        assert seen == [(False, {"second"})]
        await until(lambda: (True, {"third"}) in seen)
        assert (True, {"second"}) not in seen


async def test_a_replica_that_is_still_picked_after_a_failed_probe_is_held_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its closed connections, and by the first law with rules of models."""
    status = [200]

    async def health(_request: web.Request) -> web.Response:
        return web.Response(status=status[0])

    async with (
        engine([503], health=health) as url,
        watching(monkeypatch, {"one": url}, fall=1000, rise=1) as found,
    ):  # fmt: skip
        found.ruled = False
        address = found.watcher._observed["one"].config.address
        for replaced in (lambda: found.watcher._closed(address, 0.0), found.watcher.models_bound):
            found.ruled, status[0] = False, 200
            await until(lambda: found.probes[-1:] == [("one", True)] and found.ready[-1])
            status[0] = 500
            await until(lambda: not found.probes[-1][1])
            found.ruled = True
            found.ready.clear()
            replaced()
            assert found.ready == [False]


async def test_replicas_at_one_address_are_all_held_back_when_its_process_may_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two names for one server, as one that runs several models."""
    async with engine([listing("m")]) as url, watching(monkeypatch, {"one": url, "two": url}, probe_s=5.0) as found:
        await until(lambda: all(one.ready for one in found.watcher._observed.values()))
        found.probes.clear()
        found.ready.clear()
        found.watcher._closed(found.watcher._observed["one"].config.address, 0.0)
        assert (found.probes, found.ready) == ([("one", True), ("two", True)], [False, False])
        found.watcher.announce([found.watcher._observed["one"].config])
        await until(lambda: "two" not in found.watcher._observed and found.ready[-1])
        found.ready.clear()
        found.watcher._closed(found.watcher._observed["one"].config.address, 1.0)
        assert found.ready == [False]


async def test_an_engine_that_closes_its_connections_after_a_fixed_time_is_held_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that keeps connections for 0.7 s lost 4 of 10 requests."""
    async with engine([listing("m")]) as url, watching(monkeypatch, {"one": url}, probe_s=0.05) as found:
        address = found.watcher._observed["one"].config.address
        await until(lambda: found.ready and found.ready[-1])
        for n, rested_s in enumerate((0.71, 0.7, 0.73, 1.2, 0.3)):
            await until(lambda: found.watcher._observed["one"].ready)
            found.ready.clear()
            found.watcher._closed(address, rested_s)
            assert found.ready == ([] if n in (1, 2) else [False]), rested_s


async def test_an_engine_whose_counters_run_backwards_is_asked_anew_what_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = [1000.0]

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=page("3", more=f"process_start_time_seconds {started[0]}\n"))

    async with served(answer) as url, watching(monkeypatch, {"one": url}, probe_s=0.3) as found:
        await until(lambda: found.ready and found.ready[-1] and found.waiting("one") == 3)
        found.ready.clear()
        started[0] = 2000.0
        await until(lambda: False in found.ready and found.ready[-1])


async def test_an_engine_that_did_not_say_what_it_serves_gets_no_more_work_once_a_law_has_rules_of_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its next probe, and no other."""
    async with (
        engine([503]) as mute, engine([404]) as without, engine([listing("m")]) as told,
        watching(monkeypatch, {"mute": mute, "without": without, "told": told}) as found,
    ):  # fmt: skip
        found.ruled = False
        seen = found.watcher._observed
        await until(lambda: all(one.ready and one.models_known == (name != "mute") for name, one in seen.items()))
        found.probes.clear()
        found.ready.clear()
        found.watcher.models_bound()
        assert (found.probes, found.ready) == ([("mute", True)], [False])


@pytest.mark.parametrize("says", [listing(*(f"m{n}" for n in range(5000))), 0])
async def test_a_list_that_is_too_long_or_breaks_off_once_says_nothing_of_what_models_are_based_on(
    monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    """What comes next where it broke off may be another process's."""
    async with engine([says, 503]) as url, watching(monkeypatch, {"one": url}) as found:
        await until(lambda: found.probed("one") >= 3)  # at first it is asked by two at once
        found.ready.clear()
        await until(lambda: len(found.ready) >= 4)
        assert not any(found.ready)
        assert any("/v1/models: " in problem for problem in found.watcher.problems("one"))


@pytest.mark.parametrize("ruled", [True, False])
async def test_a_refused_probe_holds_a_replica_back_at_once_if_the_law_has_rules_of_models(
    monkeypatch: pytest.MonkeyPatch, ruled: bool
) -> None:
    """No connection rests there whose end would tell that the process has ended."""

    async def page(request: web.Request) -> web.Response:
        answer = web.Response(text=PAGE) if request.path == "/metrics" else web.json_response(listing("m"))
        answer.force_close()
        return answer

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    place = AsyncExitStack()
    url = await place.enter_async_context(served(app))
    async with watching(monkeypatch, {"one": url}) as found:
        found.ruled = ruled
        await until(lambda: any(found.ready))
        probed = len(found.probes)
        await place.aclose()
        await until(lambda: not all(ok for _, ok in found.probes[probed:]))
        assert all(found.ready[probed:]) is not ruled


async def test_what_requests_find_has_a_replica_asked_at_once_and_held_back_if_nothing_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two names for one server, as one that runs several models."""
    lists: list[Any] = [listing("m")]
    seldom = {"probe_s": 0.05, "models_s": 86400.0}
    async with engine(lists) as url, watching(monkeypatch, {"one": url, "two": url}, **seldom) as found:
        seen = found.watcher._observed
        await until(lambda: all(one.ready for one in seen.values()))
        found.probes.clear()
        found.ready.clear()
        found.watcher.recheck("gone", outcome.CONNECT_FAILED)
        found.watcher.recheck("one", outcome.MODEL_NOT_SERVED)
        assert not found.probes
        await until(lambda: not seen["one"].models_doubted.is_set())
        found.probes.clear()
        found.ready.clear()
        found.watcher.recheck("one", outcome.CONNECT_FAILED)
        assert (found.probes, found.ready) == ([("one", True), ("two", True)], [False, False])
        assert all(one.models_doubted.is_set() for one in seen.values())
        await until(lambda: all(one.ready for one in seen.values()))


async def test_requests_have_a_replica_asked_what_it_serves_no_more_often_than_it_is_probed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []
    seldom = {"probe_s": 60.0, "models_s": 86400.0}
    async with engine([listing("m")], asked) as url, watching(monkeypatch, {"one": url}, **seldom) as found:
        await until(lambda: found.watcher._observed["one"].ready)
        for _ in range(50):
            found.watcher.recheck("one", outcome.MODEL_NOT_SERVED)
            await asyncio.sleep(0.005)
        assert len(asked) <= 2  # by its first probe, and beside it


async def test_model_lists_of_many_engines_at_once_make_few_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SWAP_S", 0.3)
    async with engine([listing("a")]) as url, watching(monkeypatch, {"fine": url}, {"models": ["a"]}) as found:
        await until(lambda: found.probed("fine") >= 3)
        assert found.views == 1  # it serves its models: there is nothing to load
        many = [announced(url, f"r{number}", models=[]) for number in range(20)]
        found.watcher.announce(many)
        await until(lambda: len(found.view.by_model.get("a", ())) == 20)
        assert found.views < 12  # the announcement, one that left, and those that came within a moment or a few


async def test_slots_are_asked_of_the_engine_where_they_are_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    models, info = [listing("m", owned_by="sglang")], {"max_running_requests": 96}
    async with engine(models, None, info) as url:
        async with watching(monkeypatch, {"one": url}, models_s=0.02) as found:
            assert found.view.replicas["one"].slots == members.SLOTS
            await until(lambda: found.view.replicas["one"].slots == 96)
            models[0] = listing("m", owned_by="somebody")  # another engine came in its place, which reports nothing
            await until(lambda: found.view.replicas["one"].slots == members.SLOTS)
        models[0] = listing("m", max_model_len=4096, owned_by="sglang")
        async with watching(monkeypatch, {"one": url}, {"slots": 7}, models_s=0.02) as found:
            await until(lambda: found.view.facts("m").max_model_len == 4096)
            assert found.view.replicas["one"].slots == 7


async def test_slots_are_read_for_each_model_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = {"m": 3, "n": 4}, [0]

    async def config(request: web.Request) -> web.Response:
        asked[0] += 1
        count = found[request.match_info["model"]]
        return web.json_response({"max_batch_size": 8, "dynamic_batching": {}, "instance_group": [{"count": count}]})

    page = ["nv_inference_pending_request_count 0\n"]

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=page[0])

    app = web.Application()
    app.router.add_get("/v2/models/{model}/config", config)
    app.router.add_get("/metrics", metrics)
    async with served(app) as url:
        more = {"engine": "triton", "models": ["m", "n"], "metrics": f"{url}/metrics"}
        async with watching(monkeypatch, {"one": url}, more, models_s=0.02) as result:
            await until(lambda: result.view.replicas["one"].slots == 24)
            found["n"] = 2  # loaded again
            await until(lambda: result.view.replicas["one"].slots == 16)
            page[0] = (
                'nv_trt_llm_request_metrics{request_type="waiting"} 0\n'
                'nv_trt_llm_request_metrics{request_type="scheduled"} 0\n'
                'nv_trt_llm_request_metrics{request_type="max"} 512\n'
            )
            await until(lambda: result.view.replicas["one"].slots == 512)
            found["n"] = 1  # an engine that also reports it in metrics is trusted there
            before = asked[0]
            await until(lambda: asked[0] >= before + 5)
            assert result.view.replicas["one"].slots == 512
        async with watching(monkeypatch, {"one": url}, {**more, "slots": 7}, models_s=0.02) as result:
            await until(lambda: result.probed("one") >= 2)
            assert result.view.replicas["one"].slots == 7


async def test_an_engine_that_starts_with_us_is_known_once_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)

    async def models(_request: web.Request) -> web.Response:
        return web.json_response(listing("m", owned_by="vllm"))

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with watching(monkeypatch, {"one": f"http://127.0.0.1:{port}"}) as text:  # `models_s` unchanged: 30 s
        await until(lambda: text.probed("one") >= 2)
        assert not text.view.replicas["one"].token_ids
        async with served(app, port=port):
            await until(lambda: text.view.replicas["one"].token_ids)


async def test_models_that_are_not_configured_are_requested_with_the_engines_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: list[Any] = [503]
    asked: list[str | None] = []
    async with engine(models, asked) as url:
        async with watching(monkeypatch, {"one": url}, {"models": []}, models_s=0.02) as found:
            await until(lambda: any("/v1/models: status 503; " in problem for _, problem in found.said))
            assert found.view.by_model == {}
            models[0] = listing("a", "b")
            await until(lambda: found.view.by_model == {"a": ("one",), "b": ("one",)})
            models[0] = 503  # it restarts: its last report stays valid
            await until(lambda: len(asked) >= 8)
            assert set(found.view.by_model) == {"a", "b"}
            models[0] = listing("c")
            await until(lambda: set(found.view.by_model) == {"c"})
        assert set(asked) == {None}
        monkeypatch.setenv("FARHOP_TEST_ENGINE", "sk-engine")
        more: dict[str, Any] = {"engine_key": "env:FARHOP_TEST_ENGINE"}
        async with watching(monkeypatch, {"one": url}, {"models": []}, top=more) as found:
            await until(lambda: set(found.view.by_model) == {"c"})
        assert asked[-1] == "Bearer sk-engine"


async def test_an_engine_that_wants_its_key_for_every_page_is_watched_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama.cpp's server wants it for its metrics. What is elsewhere is not the engine, and gets none."""
    monkeypatch.setenv("FARHOP_TEST_ENGINE", "sk-engine")
    elsewhere: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer sk-engine":
            return web.Response(status=401)
        return web.json_response({"data": []}) if request.path == "/v1/models" else web.Response(text=PAGE)

    async def exporter(request: web.Request) -> web.Response:
        elsewhere.append(request.headers.get("authorization"))
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    more: dict[str, Any] = {"engine_key": "env:FARHOP_TEST_ENGINE"}
    async with served(app) as url, served(exporter) as other:
        async with watching(monkeypatch, {"one": url}, {"probe": {"path": "/ready"}}, top=more) as found:
            await until(lambda: found.waiting("one") == 3 and found.probes)
            assert found.probes[-1] == ("one", True)
        async with watching(monkeypatch, {"one": url}, {"metrics": f"{other}/metrics"}, top=more) as found:
            await until(lambda: found.waiting("one") == 3)
        assert set(elsewhere) == {None}
        async with watching(monkeypatch, {"one": url}, {"models": []}) as found:
            await until(lambda: any("status 401; give `engine_key`" in problem for _, problem in found.said))


async def test_more_models_than_a_report_can_say_leave_a_replica_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MODELS_LIMIT", 2)
    async with (
        engine([listing("a", "b")]) as first,
        engine([listing("b", "c")]) as second,
        watching(monkeypatch, {"one": first, "two": second}, {"models": []}) as found,
    ):
        await until(lambda: found.said)
        assert len(found.view.replicas) == 1
        assert found.refused.count("discovery_limit") == 1
        assert found.said[0][1].startswith("left out: more than 2 models")


async def test_a_replicas_problem_is_shown_with_the_page_that_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong port, a page that is not there, a server that only loads: each by its URL, until it is well."""
    (nobody,) = free_ports(1)
    health = [404]

    async def page(request: web.Request) -> web.Response:
        return web.Response(status=health[0] if request.path == "/health" else 501, text="what?")

    app = web.Application()
    app.router.add_get("/{tail:.*}", page)
    async with (
        served(app) as url,
        watching(monkeypatch, {"one": url, "two": f"http://127.0.0.1:{nobody}"}, models_s=0.02) as found,
    ):
        problems = found.watcher.problems
        await until(lambda: len(problems("one")) == len(problems("two")) == 1)
        assert problems("two") == [
            f"http://127.0.0.1:{nobody}/health: unreachable; is the engine there? else correct its `url`"
        ]
        elsewhere = (
            "is the engine there? else correct its `url`, or name the page where it tells its health (`probe.path`)"
        )
        assert problems("one") == [f"{url}/health: status 404; {elsewhere}"]
        await until(lambda: ("one", *problems("one")) in found.said)  # once it is down, which takes three
        health[0] = 503
        await until(lambda: problems("one") == [f"{url}/health: status 503; it is not ready yet"])
        assert ("one", *problems("one")) not in found.said  # so does every engine while it loads
        health[0] = 200
        lack = f"{url}/metrics: status 501; its load is not seen until it serves metrics"
        await until(lambda: problems("one") == [lack])
        assert ("one", lack) in found.said
        found.watcher.announce([])
        await until(lambda: not problems("one") and not problems("two"))


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (401, "status 401; give `engine_key`, or its `models`"),
        (404, "status 404; is the engine there? else correct its `url`, or give it `models`"),
    ],
)
async def test_an_engine_that_does_not_list_its_models_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, says: int, problem: str
) -> None:
    async with (
        engine([says]) as url,
        watching(monkeypatch, {"one": url}, {"models": []}, models_s=0.02) as found,
    ):
        await until(lambda: ("one", f"{url}/v1/models: {problem}") in found.said)
        assert f"{url}/v1/models: {problem}" in found.watcher.problems("one")
