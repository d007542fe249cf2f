"""What is seen of requests, through both tiers and a real OTLP receiver, and of every ending a request can have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import MODEL, Both, Engine, both, chat, head, send, streaming, tenant, topology, until
from structlog.testing import capture_logs

from farhop.balance import outcome
from farhop.balance.machine import Address, Forward, Request, Usage
from farhop.config import ConfigError
from farhop.service.authentication.authenticator import Caller
from farhop.service.observability.decisions import Decisions
from farhop.service.observability.request_telemetry import MODEL_CHARS_MAX, InstrumentedTier, RequestTelemetry
from farhop.telemetry.logs import Throttled
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.spans import Tracing
from farhop_lab.world.collector import Collector, SpanRecord
from topology.law import Law

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    made = Collector()
    await made.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield made
    await made.stop()


@pytest.fixture
async def up(collector: Collector, engine: Engine) -> AsyncIterator[Both]:
    world = topology(tenant("records-in-japan", residency={
        "processing": {"allow": ["world"]}, "logging": {"allow": ["jp"]}
    }))  # fmt: skip
    async with both(engine, world, regional={"queue": {"wait_s": 5.0}}) as running:
        yield running


async def _trace(up: Both, collector: Collector, count: int, trace_id: str = TRACE) -> dict[str, list[SpanRecord]]:
    await up.global_.instruments.tracing.flush()
    await up.regional.instruments.tracing.flush()
    by_name: dict[str, list[SpanRecord]] = {}
    for span in await collector.wait_for(trace_id, count, 60.0):
        by_name.setdefault(span.name, []).append(span)
    return by_name


def _traced(number: int = 1, **more: Any) -> bytes:
    return chat(traceparent=f"00-{TRACE[:-1]}{number:x}-{PARENT}-01", **more)


async def test_the_spans_of_a_request_hang_together(up: Both, collector: Collector) -> None:
    answer = await send(up.entry, _traced(12, body=streaming()))
    assert answer.status == 200
    spans = await _trace(up, collector, 6)
    assert {name: len(found) for name, found in spans.items()} == {
        "farhop.global": 1, "farhop.global.decide": 1, "farhop.relay": 2,
        "farhop.regional": 1, "farhop.regional.pick": 1,
    }  # fmt: skip
    root, below = spans["farhop.global"][0], spans["farhop.regional"][0]
    above_relay = next(s for s in spans["farhop.relay"] if s.parent_id == root.span_id)
    below_relay = next(s for s in spans["farhop.relay"] if s.parent_id == below.span_id)
    assert root.parent_id == PARENT
    assert spans["farhop.global.decide"][0].parent_id == root.span_id
    assert below.parent_id == above_relay.span_id
    assert spans["farhop.regional.pick"][0].parent_id == below.span_id
    for inner, outer in ((above_relay, root), (spans["farhop.global.decide"][0], root), (below_relay, below)):
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert spans["farhop.global.decide"][0].end_ns <= above_relay.start_ns
    assert root.attributes["farhop.decision"] == answer.headers["x-farhop-decision"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["farhop.ttft_ms"] > 0
    assert spans["farhop.global.decide"][0].attributes["farhop.region"] == "virginia"
    assert (root.status, above_relay.status) == ("unset", "unset")


async def test_an_attempt_that_failed_and_a_stream_that_died_are_errors(
    up: Both, collector: Collector, engine: Engine
) -> None:
    engine.behaviour = "die"
    answer = await send(up.entry, _traced(12, body=streaming()))
    assert b"upstream_died_mid_stream" in answer.body
    spans = await _trace(up, collector, 6)
    assert {span.status for name in ("farhop.global", "farhop.relay", "farhop.regional") for span in spans[name]} == {
        "error"
    }
    assert spans["farhop.global"][0].status_text == "upstream_died_mid_stream"


async def test_a_wait_in_the_queue_is_a_span(up: Both, collector: Collector, engine: Engine) -> None:
    engine.page = engine.page.replace('waiting{engine="0"} 0', 'waiting{engine="0"} 3')
    await until(lambda: up.regional.flow.replicas.view.replicas["one"].sample.waiting == 3)
    asked = asyncio.create_task(send(up.client, _traced(12)))
    await until(lambda: len(up.regional.flow.queue) == 1)
    engine.page = engine.page.replace('waiting{engine="0"} 3', 'waiting{engine="0"} 0')
    assert (await asked).status == 200
    spans = await _trace(up, collector, 4)
    queue, pick = spans["farhop.regional.queue"][0], spans["farhop.regional.pick"][0]
    assert queue.parent_id == pick.parent_id == spans["farhop.regional"][0].span_id
    assert queue.end_ns <= pick.start_ns
    assert queue.duration_ms > 1.0


async def test_a_decision_that_sends_a_request_nowhere_has_its_span(up: Both, collector: Collector) -> None:
    answer = await send(up.entry, _traced(12, x_farhop_allow="us", key="sk-farhop-not-us"))
    assert answer.status == 451
    assert await _spans_of_others(up, collector) == {}  # not-us may not be recorded in Virginia
    answer = await send(up.entry, _traced(13, body={"model": "none", "messages": [{"role": "user", "content": "x"}]}))
    assert answer.status == 404
    spans = await _trace(up, collector, 2, TRACE[:-1] + "d")
    assert spans["farhop.global.decide"][0].parent_id == spans["farhop.global"][0].span_id
    assert spans["farhop.global"][0].status_text == "", "what a client did wrong is no error of ours"
    assert spans["farhop.global"][0].attributes["farhop.outcome"] == "unknown_model"


async def _spans_of_others(up: Both, collector: Collector) -> dict[str, list[SpanRecord]]:
    """A later request's spans are all here: an earlier one's would be, too."""
    await send(up.entry, _traced(15))
    await _trace(up, collector, 6, TRACE[:-1] + "f")
    return {span.name: [span] for span in collector.trace(TRACE)}


@pytest.mark.parametrize("key", ["records-in-japan", "japan-only"])
async def test_a_request_that_may_not_be_recorded_here_leaves_no_record(
    up: Both, collector: Collector, key: str
) -> None:
    answer = await send(up.entry, _traced(12, key=f"sk-farhop-{key}"))
    assert answer.status in (200, 307)
    assert await _spans_of_others(up, collector) == {}
    assert len(up.global_.decisions) == len(up.regional.decisions) == 1  # the later request's
    if answer.status == 200:
        assert up.global_.decisions.get(answer.headers["x-farhop-decision"]) is None


@pytest.mark.parametrize("of_whom", ["the tenant", "its key", "its model", "a law that came meanwhile"])
async def test_no_span_goes_to_a_collector_where_the_law_allows_no_records(
    collector: Collector, engine: Engine, of_whom: str
) -> None:
    in_us: dict[str, Any] = {"residency": {"processing": {"allow": ["world"]}, "logging": {"allow": ["us"]}}}
    plain = tenant("ours")
    at_first = {
        "the tenant": tenant("ours", **in_us),
        "its key": {**plain, "keys": [{**plain["keys"][0], "within": ["us"]}]},
        "its model": {**plain, "models": {MODEL: {"deny": ["jp"]}}},
        "a law that came meanwhile": plain,
    }[of_whom]
    elsewhere = {"traces": {"region": "tokyo"}}
    async with both(engine, topology(at_first), regional=elsewhere, global_=elsewhere) as up:
        engine.behaviour = "wait"
        asking = asyncio.create_task(send(up.entry, _traced(12, key="sk-farhop-ours")))
        await until(lambda: engine.seen)
        if of_whom == "a law that came meanwhile":
            for one in (up.global_, up.regional):
                one.laws.adopt(Law(replace(topology(tenant("ours", **in_us)), epoch=2)))
        engine.release.set()
        answer = await asking
        assert answer.status == 200
        assert await _spans_of_others(up, collector) == {}
        assert up.global_.decisions.get(answer.headers["x-farhop-decision"]) is not None  # kept here


async def test_no_span_of_a_refusal_leaves_for_where_the_rule_of_its_models_name_forbids_it(
    collector: Collector, engine: Engine
) -> None:
    """A name that stands for a model, on a path that cannot ask for another than it names."""
    world = topology(tenant("ours", models={"auto": {"deny": ["jp"]}}))
    elsewhere = {"traces": {"region": "tokyo"}, "routes": [{"model": "auto", "models": [{"model": MODEL}]}]}
    async with both(engine, world, global_=elsewhere) as up:
        refused = _traced(12, key="sk-farhop-ours", path="/v2/models/auto/generate", body={"text_input": "hello"})
        assert (await send(up.entry, refused)).status == 400
        assert await _spans_of_others(up, collector) == {}


async def test_spans_below_one_that_is_not_exported_hang_on_the_caller_s(collector: Collector, engine: Engine) -> None:
    in_us: dict[str, Any] = {"residency": {"processing": {"allow": ["world"]}, "logging": {"allow": ["us"]}}}
    async with both(engine, topology(tenant("ours", **in_us)), global_={"traces": {"region": "tokyo"}}) as up:
        assert (await send(up.entry, _traced(12, key="sk-farhop-ours"))).status == 200
        spans = await _trace(up, collector, 3)
    assert set(spans) == {"farhop.regional", "farhop.regional.pick", "farhop.relay"}
    assert spans["farhop.regional"][0].parent_id == PARENT


@pytest.mark.parametrize("tier", ["global_", "regional"])
async def test_a_collector_in_no_region_is_an_error_that_names_the_field(engine: Engine, tier: str) -> None:
    with pytest.raises(ConfigError, match="no region 'atlantis' in the topology; known are frankfurt"):
        async with both(engine, topology(), **{tier: {"traces": {"region": "atlantis"}}}):
            pass


async def test_a_request_that_ends_before_it_is_read_leaves_nothing_where_another_law_forbids_it(
    up: Both, collector: Collector
) -> None:
    law = up.global_.flow.law
    tenants = dict(law.topology.tenants)
    whole = _traced(12)
    reader, writer = await asyncio.open_connection("127.0.0.1", up.entry)
    writer.write(whole[:-20])
    await until(lambda: up.global_.metrics.in_flight == 1)
    logging = tenants["records-in-japan"].residency
    tenants["anywhere"] = replace(tenants["anywhere"], residency=logging)
    up.global_.laws.adopt(Law(replace(law.topology, epoch=law.epoch + 1, tenants=tenants)))
    writer.close()
    await until(lambda: up.global_.metrics.in_flight == 0)
    up.global_.laws.adopt(Law(replace(law.topology, epoch=law.epoch + 2)))
    assert await _spans_of_others(up, collector) == {}
    del reader


@pytest.mark.parametrize("forbids", [False, True])
async def test_an_engine_s_error_is_not_logged_where_a_law_that_came_meanwhile_forbids_records(
    engine: Engine, forbids: bool
) -> None:
    structlog.reset_defaults()  # another test may have configured where logs go
    engine.behaviour, engine.complaint = "error", "Traceback (most recent call last):\n  no more memory"
    logging = {"residency": {"processing": {"allow": ["world"]}, "logging": {"allow": ["jp" if forbids else "us"]}}}
    later = Law(replace(topology(tenant("ours", **logging)), epoch=2))
    with capture_logs() as entries:
        async with both(engine, topology(tenant("ours"))) as up:

            def law_comes(_body: dict[str, Any]) -> str:
                up.regional.laws.adopt(later)
                return ""

            engine.refuses = law_comes
            answer = await send(up.client, chat("sk-farhop-ours"))
            assert (answer.status, answer.code) == (500, "engine_error")
    assert (answer.headers["x-farhop-decision"] in str(entries)) is not forbids


async def test_what_a_model_turns_out_to_be_based_on_binds_what_was_kept(engine: Engine) -> None:
    in_us, in_japan = {"processing": {"allow": ["us"]}}, {"base": {"allow": ["jp"]}}
    world = topology(tenant("careful", residency=in_us, models=in_japan))
    async with both(engine, world, regional={"watch": {"models_s": 0.05}}) as up:
        for key in ("sk-farhop-careful", "sk-farhop-anywhere"):
            assert (await send(up.entry, chat(key, streaming("hello")))).status == 200
        for decisions in (up.global_.decisions, up.regional.decisions):
            assert [one["tenant"] for one in decisions.last(9)] == ["anywhere", "careful"]
        engine.models = [{"id": MODEL, "object": "model", "root": "/adapters/one", "parent": "base"}]
        for decisions in (up.global_.decisions, up.regional.decisions):
            await until(lambda: [one["tenant"] for one in decisions.last(9)] == ["anywhere"])  # noqa: B023
        assert (await send(up.entry, chat("sk-farhop-careful", streaming("hello")))).status == 451


async def test_records_of_requests_each_narrowed_otherwise_are_judged_in_turns_and_none_is_read_before() -> None:
    decisions, judged = Decisions(), list[int]()
    told = telemetry(TierMetrics("global", "virginia", "g1"), decisions)

    def may_record(caller: Caller, _model: str) -> bool:
        judged.append(int(caller.narrow[0][0]))
        return judged[-1] % 2 == 0

    told.may_record = may_record
    for n in range(2000):
        one = {"tenant": "a", "key": "", "narrow": ((str(n),),), "model": "m", "asked_for": ""}
        decisions.put(str(n), Kept(**one))
    told.law_changed()
    most = len(judged)
    assert 0 < most <= 200
    assert decisions.get("1") is None, "before its turn"
    assert decisions.get("2") == {}
    while len(decisions) > 1000:
        before = len(judged)
        await asyncio.sleep(0)
        most = max(most, len(judged) - before)
    assert most <= 200
    assert sorted(judged) == list(range(2000)), "each once"
    await told.close()


class Kept(SimpleNamespace):
    """What a record tells of its request; called, nothing."""

    def __call__(self) -> dict[str, Any]:
        return {}


def test_readers_of_records_are_notified_if_a_law_allows_fewer_records() -> None:
    def law(epoch: int, *places: str) -> Law:
        told = topology(tenant("anyone", residency={"processing": {"allow": ["world"]}, "logging": {"allow": places}}))
        return Law(replace(told, epoch=epoch))

    decisions, narrowed = Decisions(), list[int]()
    told, holder = telemetry(TierMetrics("global", "virginia", "g1"), decisions), SimpleNamespace(law=law(1, "us"))
    told.law_holder = holder
    decisions.narrowed.append(lambda: narrowed.append(holder.law.epoch))
    told.law_changed()  # what came before is not known
    for holder.law in (law(2, "us", "jp"), law(3, "us"), law(4, "jp"), law(5, "us", "jp")):
        told.law_changed()
    assert narrowed == [1, 4]


async def test_record_has_regions_and_reasons_but_no_text(up: Both, engine: Engine) -> None:
    answer = await send(up.entry, chat(body=streaming("xyzzy-plugh")))
    record = up.global_.decisions.get(answer.headers["x-farhop-decision"])
    assert record is not None
    assert record["outcome"] == "served"
    assert record["attempts"] == [{"target": "virginia", "outcome": "served"}]
    assert record["reasons"]["chosen"] == "virginia"
    assert record["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "cached_tokens": 0}
    assert "xyzzy" not in repr(record)
    below = up.regional.decisions.get(answer.headers["x-farhop-decision"])
    assert below is not None
    assert below["trace_id"] == record["trace_id"]


ENDINGS = {
    "served": (chat(), "served", "2xx"),
    "stream": (chat(body=streaming()), "served", "2xx"),
    "models": (head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"), "served", "2xx"),
    "error": (chat(), "engine_error", "5xx"),
    "die": (chat(body=streaming()), "upstream_died_mid_stream", "2xx"),
    "key": (chat(key="nobody"), "unknown_key", "4xx"),
    "body": (chat(body=b"{"), "invalid_json", "4xx"),
    "unlawful": (chat(x_farhop_allow="atlantis"), "no_lawful_region", "4xx"),
    "nowhere": (chat(key="sk-farhop-eu-only"), "no_region_serving", "5xx"),
    "redirect": (chat(key="sk-farhop-japan-only"), "entry_forbidden", "3xx"),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_request_is_counted_once_however_it_ends(up: Both, engine: Engine, ending: str) -> None:
    wire, reason, code = ENDINGS[ending]
    engine.behaviour = ending
    await send(up.entry, wire)
    await up.at_rest()
    text = up.global_.metrics.render().decode()
    counted = [line for line in text.splitlines() if line.startswith("farhop_requests_total{")]
    assert len(counted) == 1
    assert f'reason="{reason}"' in counted[0]
    assert f'code="{code}"' in counted[0]
    assert counted[0].endswith(" 1.0")
    assert "farhop_in_flight{" in text
    quick = "served" in reason or ending == "die"
    tokens = float(_sample(text, "farhop_ttft_seconds_count"))
    assert tokens == (1.0 if quick and ending != "models" else 0.0)  # an error's first byte is no first token
    assert float(_sample(text, "farhop_tpot_seconds_count")) == (1.0 if ending == "stream" else 0.0)


def _sample(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name)).split()[-1]


async def test_a_client_that_leaves_is_counted_once_and_takes_the_attempt_with_it(up: Both, engine: Engine) -> None:
    engine.behaviour = "pause"
    reader, writer = await asyncio.open_connection("127.0.0.1", up.entry)
    writer.write(chat(body=streaming()))
    await reader.readuntil(b"one")
    assert up.global_.metrics.in_flight == up.regional.metrics.in_flight == 1
    writer.close()
    await up.at_rest()
    for balancer in (up.global_, up.regional):
        assert 'reason="client_left"' in balancer.metrics.render().decode()
        assert balancer.flow.under_way == 0


class Ticking:
    """A clock that moves at every look."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        self.at += 0.01
        return self.at

    def wall_ns(self, now: float) -> int:
        return int(now * 1e9)


class Reasons:
    def attributes(self, decision: Any) -> dict[str, Any]:
        return {}

    def record(self, decision: Any) -> dict[str, Any]:
        return {"decision": decision}

    def predicted_hit(self, decision: Any) -> tuple[float, str]:
        return 4.0, "exact"

    def predicted_ttft_ms(self, decision: Any) -> float | None:
        return 20.0


class Passage:
    """An active request, as the telemetry sees it."""

    def __init__(self, context: Any, stream: bool, model: str = MODEL) -> None:
        self.context = context
        self.request = Request("1", "anywhere", model, 100, 200, (1, 2), 2000.0, stream=stream)
        self.forward = Forward("1", 1, "virginia", Address("h", 1), 20.0)
        self.reasons: Any = None
        self.hold_from: float | None = None
        self.forwarded_at = self.began_at = self.ended_at = 0.0
        self.status = 0


class Tried:
    number, status, target = 1, 200, "virginia"


def telemetry(
    metrics: TierMetrics, decisions: Decisions | None = None, clock: Ticking | None = None
) -> RequestTelemetry:
    return RequestTelemetry(
        "farhop.global",
        "farhop.global.decide",
        tracing=Tracing("t", "virginia", "g1"),
        metrics=metrics,
        decisions=Decisions() if decisions is None else decisions,
        clock=clock or Ticking(),
        rng=Random(1),
        reasons=Reasons(),
    )


STEPS = st.lists(
    st.sampled_from(["hold", "forward", "begin", "fail", "conclude", "turn away", "mute", "leave"]), max_size=12
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS, st.booleans(), st.sampled_from(outcome.catalogue()))
def test_every_request_is_counted_exactly_once(steps: list[str], stream: bool, reason: outcome.Outcome) -> None:
    metrics, clock = TierMetrics("global", "virginia", "g1"), Ticking()
    watched = telemetry(metrics, clock=clock)
    context = watched.begin()
    active: Any = Passage(context, stream)
    usage = Usage(10, 5, 2)
    for step in [*steps, "leave"]:
        if step == "hold":
            active.hold_from = clock.now()
        elif step == "forward":
            active.forwarded_at, active.reasons = clock.now(), object()
            watched.forwarded(active)
        elif step == "begin":
            active.began_at, active.status = clock.now(), 200
        elif step == "fail":
            watched.attempt_over(active, Tried, reason)  # type: ignore[arg-type]
        elif step == "conclude":
            watched.concluded(active, reason, 200, usage)
        elif step == "turn away":
            watched.turned_away(context, reason, 503)
        elif step == "mute":
            watched.mute(context)
        else:
            watched.concluded(active, outcome.CLIENT_LEFT, 0, None)
    assert metrics.in_flight == 0
    counted = [float(x.split()[-1]) for x in metrics.render().decode().splitlines() if x.startswith("farhop_requests_")]
    assert sum(n for n in counted if n < 1e6) == 1.0


def test_the_times_of_a_stream_and_its_promise() -> None:
    metrics, clock = TierMetrics("global", "virginia", "g1"), Ticking()
    watched = telemetry(metrics, clock=clock)
    context = watched.begin()
    active: Any = Passage(context, stream=True)
    active.reasons, active.forwarded_at = object(), context.arrived_at + 0.1
    watched.forwarded(active)
    active.began_at, active.status = context.arrived_at + 0.15, 200
    clock.at = context.arrived_at + 0.55 - 0.01 * 2  # one look to record the ending, one to finish it
    watched.concluded(active, outcome.SERVED, 200, Usage(10, 5, 2))
    text = metrics.render().decode()
    assert float(_sample(text, "farhop_ttft_seconds_sum")) == pytest.approx(0.15)
    assert float(_sample(text, "farhop_tpot_seconds_sum")) == pytest.approx(0.1, abs=0.006)
    late = next(line for line in text.splitlines() if "ttft_error_seconds_sum" in line and 'direction="late"' in line)
    assert float(late.split()[-1]) == pytest.approx(0.03)


def test_a_record_has_the_name_that_stood_for_the_model() -> None:
    decisions = Decisions()
    watched = telemetry(TierMetrics("global", "virginia", "g1"), decisions)
    for alias, asked_for in (("auto", "auto"), ("", MODEL)):
        context = watched.begin()
        context.decision_id = alias
        passage = Passage(context, stream=False)
        passage.request = msgspec.structs.replace(passage.request, alias=alias)
        watched.concluded(passage, outcome.SERVED, 200, None)  # type: ignore[arg-type]
        record = decisions.get(alias)
        assert record is not None
        assert (record["asked_for"], record["model"]) == (asked_for, MODEL)


def test_a_record_keeps_little_of_a_large_request() -> None:
    decisions = Decisions()
    watched = telemetry(TierMetrics("global", "virginia", "g1"), decisions)
    context = watched.begin()
    context.decision_id = "d"
    watched.concluded(Passage(context, stream=False, model="m" * 100_000), outcome.UNKNOWN_MODEL, 404, None)  # type: ignore[arg-type]
    record = decisions.get("d")
    assert record is not None
    assert len(record["model"]) == MODEL_CHARS_MAX


def test_what_a_version_served_and_how_soon() -> None:
    metrics = TierMetrics("regional", "virginia", "r1")
    watched = telemetry(metrics)
    for status, began in ((200, True), (500, True), (503, False)):
        context = watched.begin()
        active: Any = Passage(context, stream=True)
        if began:
            active.began_at, active.status = context.arrived_at + 0.25, status
        watched.versioned(active, "v2", "rule", status)
    text = metrics.render().decode()
    # An error comes fast: it is no first token.
    assert float(_sample(text, "farhop_version_ttft_seconds_sum")) == pytest.approx(0.25)
    counted = [line for line in text.splitlines() if line.startswith("farhop_version_requests_total")]
    assert sorted(line.split()[-1] for line in counted) == ["1.0", "2.0"]


async def test_an_attempt_of_the_tier_above_is_known_here_from_its_head_to_its_end(up: Both, engine: Engine) -> None:
    engine.behaviour = "pause"
    sending = asyncio.create_task(send(up.entry, _traced(3, body=streaming())))
    known = up.regional.telemetry.hops
    await until(lambda: known and next(iter(known.values())).active is not None)
    ((issuer, attempt),) = known
    assert issuer == up.global_.config.balancer
    (ours,) = up.global_.relay.live.values()
    assert ours.attempt is not None
    assert ours.attempt.id == attempt
    quiet_s = up.regional.telemetry.quiet_s(issuer, attempt)
    assert quiet_s is not None
    assert 0.0 <= quiet_s < 5.0
    assert up.regional.telemetry.quiet_s("somebody/else", attempt) is None
    engine.release.set()
    await sending
    await up.at_rest()
    assert known == {}
    assert up.regional.telemetry.quiet_s(issuer, attempt) is None


def test_an_engine_that_takes_no_salt_is_named_in_the_log_now_and_then() -> None:
    said: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(warning=lambda event, **fields: said.append({"event": event, **fields}))
    telemetry: Any = SimpleNamespace(attempt_over=None)
    tier = InstrumentedTier(telemetry, Throttled(log, 60.0, lambda: 0.0))
    for target in ("one", "two", "one"):
        tier.salt_unknown(SimpleNamespace(), SimpleNamespace(target=target))  # type: ignore[arg-type]
    assert [entry["replica"] for entry in said] == ["one", "two"]
    assert "`cache_salt`" in said[0]["event"]
