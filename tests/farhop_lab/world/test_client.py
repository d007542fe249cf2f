"""The client: an ordered list of entries, redirects within them alone, pieces with their times, one Result last."""

import asyncio
import contextlib
import json
import time

import aiohttp
import pytest
from aiohttp import web

from farhop_lab.world import client as module
from farhop_lab.world.client import COMPLETION, Delta, Redirected, Result, Skipped, Usage, answer, ask, origin

BODY = {"model": "m", "messages": [], "stream": True}


class Entry:
    """One entry: `serve` answers; what was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.url = ""
        self.serve = stream()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.asked.append(request)
        return await self.serve(request)


def stream(*texts: str, tail: bytes = b"data: [DONE]\n\n", release: asyncio.Event | None = None):
    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "X-Farhop-Region": "virginia"})
        await response.prepare(request)
        for text in texts or ("a", "b"):
            await response.write(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")
            if release is not None:
                await release.wait()
        await response.write(tail)
        return response

    return serve


def says(status: int, body: bytes, **headers: str):
    async def serve(_: web.Request) -> web.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers={"content-type": "application/json", **sent})

    return serve


def hang_up(after: bytes = b""):
    async def serve(request: web.Request) -> web.StreamResponse:
        if after:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            response.enable_chunked_encoding()
            await response.prepare(request)
            await response.write(after)
        request.transport.abort()
        raise web.HTTPServiceUnavailable

    return serve


@pytest.fixture
async def entries():
    async with contextlib.AsyncExitStack() as stack:
        made = [Entry(), Entry(), Entry()]
        for entry in made:
            app = web.Application()
            app.router.add_post("/v1/{path:.*}", entry.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            entry.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield made


async def events(*arguments, **options) -> list:
    return [event async for event in ask(*arguments, **options)]


async def test_pieces_as_they_come_then_one_result(entries):
    release = asyncio.Event()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    entries[0].serve = stream("a", "b", tail=usage, release=release)
    seen = []
    async for event in ask([entries[0].url], "sk-x", BODY):
        seen.append(event)
        release.set()  # the second piece is not sent before the first was yielded
    first, second, result = seen
    assert [first.text, second.text] == ["a", "b"]
    assert 0 < first.at_ms <= second.at_ms <= result.total_ms
    assert result.ttft_ms == first.at_ms
    assert (result.status, result.text, result.error, result.ok) == (200, "ab", None, True)
    assert result.usage == Usage(9, 2, None)
    assert result.headers["x-farhop-region"] == "virginia"
    assert (result.entry, result.redirected) == (entries[0].url, False)


async def test_request_is_sent_as_expected(entries):
    await answer([entries[0].url + "/"], "sk-x", BODY, path=COMPLETION, headers={"x-farhop-allow": "eu"})
    (asked,) = entries[0].asked
    assert asked.path == COMPLETION
    assert asked.headers["authorization"] == "Bearer sk-x"
    assert asked.headers["x-farhop-allow"] == "eu"
    assert await asked.json() == BODY


async def test_no_authorization_header_is_sent_without_a_key(entries):
    await answer([entries[0].url], None, BODY)
    assert "authorization" not in entries[0].asked[0].headers


async def test_a_whole_answer(entries):
    document = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    entries[0].serve = says(200, json.dumps(document).encode())
    (result,) = await events([entries[0].url], "k", {**BODY, "stream": False})
    assert (result.text, result.usage, result.error) == ("hi", Usage(1, 1, None), None)
    assert 0 < result.ttft_ms <= result.total_ms


async def test_an_error_is_the_balancers_own_text(entries):
    fields = {"error": {"message": "m", "type": "residency_error", "param": None, "code": "no_lawful_region"}}
    entries[0].serve = says(451, json.dumps(fields).encode(), x_farhop_decision="d1")
    result = await answer([entries[0].url, entries[1].url], "k", BODY)
    assert (result.status, result.error.code, result.error.message) == (451, "no_lawful_region", "m")
    assert result.headers["x-farhop-decision"] == "d1"
    assert not entries[1].asked  # an answer is an answer
    assert result.ttft_ms is None


async def test_the_next_entry_where_one_refuses_or_hangs_up(entries, unused_tcp_port):
    gone = f"http://127.0.0.1:{unused_tcp_port}"
    entries[0].serve = hang_up()
    refused, lost, *_, result = await events([gone, entries[0].url, entries[1].url], "k", BODY)
    assert refused == Skipped(gone, "connection refused")
    assert isinstance(lost, Skipped)
    assert lost.entry == entries[0].url
    assert (result.text, result.entry) == ("ab", entries[1].url)


async def test_no_entry_at_all(unused_tcp_port):
    gone = f"http://127.0.0.1:{unused_tcp_port}"
    skipped, result = await events([gone, gone], "k", BODY)  # tried once
    assert skipped.entry == gone
    assert (result.status, result.entry, result.error.code) == (0, "", "connect_failed")
    assert gone in result.error.message


async def test_begun_request_is_never_retried(entries):
    entries[0].serve = hang_up(b'data: {"choices":[{"text":"a"}]}\n\n')
    *_, result = await events([entries[0].url, entries[1].url], "k", BODY)
    assert (result.status, result.error.code) == (200, "stream_broken")
    assert not result.ok
    assert not entries[1].asked


async def test_a_stream_cut_clean_is_reported(entries):
    entries[0].serve = stream("a", tail=b"")
    result = await answer([entries[0].url], "k", BODY)
    assert (result.text, result.error.code) == ("a", "stream_cut")


async def test_a_redirect_is_followed_key_and_all(entries):
    first, second, _ = entries
    first.serve = says(307, b"{}", location=f"{second.url}/v1/chat/completions")
    redirected, *_, result = await events([first.url], "sk-x", BODY, trusted=[second.url + "/"])
    assert redirected == Redirected(first.url, second.url)
    assert (result.text, result.redirected, result.entry) == ("ab", True, second.url)
    assert second.asked[0].headers["authorization"] == "Bearer sk-x"
    assert await second.asked[0].json() == BODY


@pytest.mark.parametrize("location", ["{stranger}/v1/chat/completions", "//{host}/x", None])
async def test_the_key_goes_to_no_stranger(entries, location):
    first, _, stranger = entries
    headers = {}
    if location is not None:
        headers["location"] = location.format(stranger=stranger.url, host=stranger.url.removeprefix("http://"))
    first.serve = says(307, b"{}", **headers)
    result = await answer([first.url, entries[1].url], "sk-x", BODY)
    assert (result.status, result.error.code) == (307, "redirect_refused")
    assert not stranger.asked


async def test_a_url_with_a_token_is_followed_anywhere_without_the_key(entries):
    first, _, stranger = entries
    first.serve = says(307, b"{}", location=f"{stranger.url}/v1/chat/completions?farhop-pass=r1.k.a-b_.c%2B")
    redirected, *_, result = await events([first.url], "sk-x", BODY, headers={"x-y": "z"})
    assert redirected == Redirected(first.url, stranger.url, by_token=True)
    assert (result.text, result.redirected, result.entry) == ("ab", True, first.url), "whose decision it was"
    (asked,) = stranger.asked
    assert asked.raw_path == "/v1/chat/completions?farhop-pass=r1.k.a-b_.c%2B"
    assert "authorization" not in asked.headers
    assert asked.headers["x-y"] == "z"
    assert await asked.json() == BODY


async def test_redirects_in_a_circle_end(entries):
    first, second, _ = entries
    first.serve, second.serve = says(307, b"{}", location=second.url), says(307, b"{}", location=first.url)
    result = await answer([first.url, second.url], "k", BODY)
    assert (result.status, result.error.code) == (307, "no_entry")
    assert len(first.asked) == len(second.asked) == 1


async def test_a_redirect_to_an_entry_that_is_gone_ends_with_the_reason(entries, unused_tcp_port):
    gone = f"http://127.0.0.1:{unused_tcp_port}"
    for entry in entries[:2]:
        entry.serve = says(307, b"{}", location=gone)
    seen = await events([entries[0].url, entries[1].url, gone], "k", BODY)
    assert [type(event) for event in seen] == [Redirected, Skipped, Result]
    assert seen[-1].error.code == "no_entry"


async def test_an_answer_larger_than_the_bound_is_an_error(entries, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 50)
    entries[0].serve = stream("x" * 100, "y")
    assert (await answer([entries[0].url], "k", BODY)).error.code == "answer_too_large"
    entries[0].serve = says(200, b"x" * 100)
    assert (await answer([entries[0].url], "k", BODY)).error.code == "answer_too_large"


async def test_a_client_gives_up_after_its_request_timeout(entries):
    entries[0].serve = stream("a", release=asyncio.Event())
    began = time.monotonic()
    result = await answer([entries[0].url], "k", BODY, request_s=0.2)
    assert time.monotonic() - began < 5.0
    assert (result.text, result.error.code) == ("a", "stream_broken")
    assert "timed out" in result.error.message


async def test_a_session_of_ones_own_stays_open(entries):
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            assert (await answer([entries[0].url], "k", BODY, session=session)).text == "ab"
        assert not session.closed


async def test_leaving_early_hangs_up(entries):
    entries[0].serve = stream("a", release=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        async with contextlib.aclosing(ask([entries[0].url], "k", BODY, session=session)) as asking:
            async for event in asking:
                assert isinstance(event, Delta)
                break
        await hung_up(entries[0])


async def hung_up(entry: Entry) -> None:
    (request,) = entry.asked
    async with asyncio.timeout(60.0):
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)


async def test_no_entries_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="at least one"):
        await answer([], "k", BODY)


@pytest.mark.parametrize(("url", "expected"), [
    ("http://h:80/v1", "http://h"), ("https://h:8443/", "https://h:8443"), ("http://[::1]:80", "http://[::1]"),
])  # fmt: skip
def test_the_origin_of_a_url_is_scheme_host_and_port(url, expected):
    assert origin(url) == expected
