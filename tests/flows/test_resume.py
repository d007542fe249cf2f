"""A stream whose engine dies is continued by another one: byte for byte what an uninterrupted one contains."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from inprocess import until
from resumes import TOKENS, Cutter, ask, chat, completion, cut_once, fleet, outcomes, sound, text_of

from farhop.accounts import segments
from farhop.accounts.usage import Reading
from farhop.balance.machine import Move
from farhop.relay.upstream.resumable import ContinuedRun
from farhop_lab.engine.core.faults import OOM_TEXT
from farhop_lab.engine.formats import render
from regional_lb.scheduler.flow import RESUMES_MAX
from tests.drills import classic


async def test_streams_cut_anywhere_equal_uncut_ones() -> None:
    rng = Random(5)
    async with fleet() as (balancer, url, engines):
        for number in range(24):
            make, tells = (chat, completion)[number % 2], number % 3 == 0
            more = {"stream_options": {"include_usage": True}} if tells else {}
            asked = make(f"{number} tell me of the sea", **more)
            expected = await ask(url, asked)
            size = 400 + 200 * TOKENS
            cut_once(engines, rng.randrange(size))
            events = await ask(url, asked)
            sound(events, expected, chats=make is chat)
            if tells:
                usage = next(event["usage"] for event in events if event.get("usage"))
                whole = next(event["usage"] for event in expected if event.get("usage"))
                assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
                    whole["prompt_tokens"], whole["completion_tokens"], whole["total_tokens"],
                )  # fmt: skip
        found = outcomes(balancer)
        assert found["resumed", ""] > 5
        assert not [one for one in found if one[0] == "broken"], found
        assert balancer.relay.resumption is not None
        assert balancer.relay.resumption.kept_bytes == 0
        assert balancer.flow.under_way == 0


EVERY = 13  # bytes; 1 takes some 20 s


async def test_stream_cut_at_any_byte_continues() -> None:
    """In a chunk's size, in its end, in an event, a character, the last chunk: of a stream as short as it gets."""
    async with fleet() as (balancer, url, engines):
        for one in engines:
            one.replica.text_model = msgspec.structs.replace(one.replica.text_model, wide=True)
        asked = completion("vom Meer", max_tokens=4, stop=["unsaid"], stream_options={"include_usage": True})
        expected = await ask(url, asked)
        for one in engines:
            one.cut_after, one.passed = 10**6, 0
        await ask(url, asked)
        size = max(one.passed for one in engines)
        assert 800 < size < 4000
        for after in range(0, size + 1, EVERY):
            cut_once(engines, after)
            sound(await ask(url, asked), expected, chats=False)
        assert set(outcomes(balancer)) == {("resumed", "")}
        assert balancer.flow.under_way == 0


async def test_a_stop_string_is_found_over_the_seam_and_never_shown() -> None:
    """Of answers with characters that tokens cut in two; each cut falls into what the stop string is made of."""
    rng = Random(9)
    async with fleet() as (balancer, url, engines):
        for one in engines:
            one.replica.text_model = msgspec.structs.replace(one.replica.text_model, wide=True)
        for number in range(18):
            make = (chat, completion)[number % 2]
            prompt, results = f"{number} erzähl vom Meer", {"stream_options": {"include_usage": True}}
            whole = text_of(await ask(url, make(prompt, **results)))
            at = rng.randrange(len(whole) // 2, len(whole) - 12)
            shows = {"include_stop_str_in_output": True} if number % 5 == 0 else {}
            asked = make(prompt, **results, stop=["unsaid", whole[at : at + 12]], **shows)
            expected = await ask(url, asked)
            assert len(text_of(expected)) < len(whole)
            size = sum(len(msgspec.json.encode(event)) + 60 for event in expected[:-2])
            cut_once(engines, size - rng.randrange(1400))
            events = await ask(url, asked)
            sound(events, expected, chats=make is chat)
            used = [[e["usage"] for e in found if e.get("usage")] for found in (events, expected)]
            assert len(used[0]) == len(used[1]) == 1
            assert used[0][0]["completion_tokens"] == used[1][0]["completion_tokens"]
        assert outcomes(balancer)["resumed", ""] >= 7
        assert set(outcomes(balancer)) == {("resumed", "")}
        assert balancer.flow.under_way == 0


async def test_stream_continues_after_an_engine_reports_that_it_is_broken() -> None:
    async with fleet() as (balancer, url, engines):
        for make in (chat, completion):
            asked = make("how it broke", max_tokens=1000)
            expected = await ask(url, asked)
            answer = asyncio.create_task(ask(url, asked))
            working: list[Cutter] = []
            while not working:
                await asyncio.sleep(0.01)
                working = [one for one in engines if one.replica.core.running]
            await asyncio.sleep(0.05)  # into the middle of it
            working[0].replica.driver.break_off(OOM_TEXT)
            sound(await answer, expected, chats=make is chat)
        assert outcomes(balancer) == {("resumed", ""): 2}


@pytest.mark.parametrize("knows", ["the first engine", "the first engine, until it is gone"])
async def test_a_stream_without_a_limit_goes_on_where_nobody_says_how_long_a_request_may_be(
    monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    async with fleet() as (balancer, url, engines):
        asked = chat("tell me of the sea", max_tokens=None, ignore_eos=False)
        expected = await ask(url, asked)
        assert len(expected) > 12
        resumption, told = balancer.relay.resumption, list[str]()
        assert resumption is not None
        known = resumption.context_tokens

        def context_tokens(target: str, model: str) -> int | None:
            told.append(target)
            if target == told[0] and (len(told) < 3 or knows == "the first engine"):
                return known(target, model)
            return 0 if target != told[0] else None

        monkeypatch.setattr(resumption, "context_tokens", context_tokens)
        cut_once(engines, 1500)
        sound(await ask(url, asked), expected, chats=True)
        assert outcomes(balancer)["resumed", ""] == 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_usage_is_told_though_the_engine_that_goes_on_says_no_done(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(render, "DONE", render.frame(b": no more\n\n"))
    async with fleet(engine=engine, resume={"mode": "text"}) as (balancer, url, engines):
        asked = chat("tell me of the sea", stream_options={"include_usage": True})
        (expected,) = (event["usage"] for event in await ask(url, asked) if event.get("usage"))
        cut_once(engines, 3000)
        events = await ask(url, asked)
        (usage,) = (event["usage"] for event in events if event.get("usage"))
        assert all(usage[name] == expected[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
        assert (events[-1], outcomes(balancer)["resumed", ""]) == ({}, 1)


async def test_a_continued_stream_waits_for_a_slow_client() -> None:
    """It was told so while another answered: what it does not read must not pile up here."""
    async with fleet() as (balancer, url, _engines):
        asked = chat("slowly", max_tokens=200)
        expected = await ask(url, asked)
        answer = asyncio.create_task(ask(url, asked))
        relay = balancer.relay
        await until(lambda: any(one.attempt is not None and one.attempt.began for one in relay.live.values()))
        (active,) = relay.live.values()
        active.pause()
        relay._move(active, Move(active.request.id, active.attempt.number), relay.clock())  # type: ignore[union-attr]
        run = active.attempt
        assert isinstance(run, ContinuedRun)
        await until(lambda: run._connection is not None)
        assert run._connection is not None
        assert not run._connection.transport.is_reading()  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
        assert not run.began
        active.resume()
        sound(await answer, expected, chats=True)
        assert outcomes(balancer) == {("moved", ""): 1, ("resumed", ""): 1}


async def test_stream_that_cannot_continue_ends_with_an_error_and_a_reason() -> None:
    async with fleet() as (balancer, url, engines):
        for more, reason in (
            ({"response_format": {"type": "json_object"}}, "structured"),
            ({"presence_penalty": 0.5}, "penalties"),
            ({"return_token_ids": True}, "asks_for_ids"),
        ):
            cut_once(engines, 2_000)
            events = await ask(url, chat("a tale", **more))
            assert "error" in events[-1] or "error" in events[-2], events[-2:]
            assert outcomes(balancer)["not_resumable", reason] == 1
        assert ("resumed", "") not in outcomes(balancer)


async def test_with_resume_off_a_cut_stream_ends_with_an_error() -> None:
    async with fleet(resume={"mode": "off"}) as (balancer, url, engines):
        assert balancer.relay.resumption is None
        cut_once(engines, 2_000)
        events = await ask(url, chat("a tale"))
        assert any("error" in event for event in events)


async def test_tenant_may_opt_out_of_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    world = classic.topology()
    anywhere = replace(world.tenants["anywhere"], resume="off")
    monkeypatch.setattr(classic, "topology", lambda: replace(world, tenants={**world.tenants, "anywhere": anywhere}))
    async with fleet() as (balancer, url, engines):
        cut_once(engines, 2_000)
        events = await ask(url, chat("a tale"))
        assert any("error" in event for event in events)
        assert outcomes(balancer) == {("not_resumable", "tenant"): 1}


async def test_stream_that_breaks_everywhere_ends() -> None:
    async with fleet() as (balancer, url, engines):

        async def keep_cutting() -> None:
            while True:
                for one in engines:
                    one.cut_after, one.passed, one.together = 600, 0, (one,)
                await asyncio.sleep(0.002)

        cutting = asyncio.create_task(keep_cutting())
        try:
            events = await asyncio.wait_for(ask(url, chat("a long tale", max_tokens=400)), 60.0)
        finally:
            cutting.cancel()
        (error,) = [event["error"] for event in events if "error" in event]
        assert error["code"] in ("request_ended_two_processes", "upstream_died_mid_stream")
        assert outcomes(balancer)["resumed", ""] <= RESUMES_MAX
        assert outcomes(balancer)["broken", "nowhere"] == 1
        assert balancer.flow.under_way == 0


async def test_a_stream_is_accounted_once_whole_resumed_or_broken(tmp_path: Path) -> None:
    """Its tokens once; those that were computed again beside them; of one that broke those that came."""
    usage = {"dir": str(tmp_path), "sync": "never"}
    # A replica that is scraped after it broke a stream did not die of it: between two breaks, that allows a third.
    async with fleet(usage=usage, watch={"probe_s": 3600.0, "scrape_s": 3600.0}) as (balancer, url, engines):
        await ask(url, chat("of the sea"))
        cut_once(engines, 3000)
        await ask(url, chat("of the wind"))
        for one in engines:
            one.cut_after, one.passed, one.together = 3000, 0, ()
        await ask(url, chat("of the sand"))
        assert balancer.accounts is not None
        files = balancer.accounts.usage
        assert files is not None
        async with asyncio.timeout(60.0):
            while files.written < 3:
                await asyncio.sleep(0.01)
    found = sorted(Reading().events(line for _, line in segments.read(tmp_path)), key=lambda one: one.time)
    whole, resumed, broken = (one.data for one in found)
    assert (whole.output_tokens, whole.regenerated_tokens, whole.measured) == (TOKENS, 0, "engine")
    assert (resumed.output_tokens, resumed.input_tokens) == (TOKENS, whole.input_tokens)
    assert resumed.regenerated_tokens > (resumed.input_tokens or 0)
    assert (resumed.outcome, resumed.attempts) == ("served", 2)
    assert broken.outcome == "request_ended_two_processes"
    assert broken.measured == "ids"
    assert 0 < (broken.output_tokens or 0) < TOKENS
