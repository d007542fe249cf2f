"""The way in, on real sockets: both tiers are up, and what must not pass does not reach the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from inprocess import MODEL, Both, Engine, both, chat, head, send, streaming, tenant, topology, until
from worlds import law, request

from farhop.balance.machine import AttemptEnded, Event, RequestArrived
from farhop.service.admission.ingress import within_arrival_law
from farhop.service.admission.request_reader import RequestReader
from farhop.service.authentication.authenticator import NARROW_BYTES_MAX, NARROW_PLACES_MAX, narrow_of
from topology.law import Law
from topology.model import Rule


@pytest.fixture
async def up(engine: Engine) -> AsyncIterator[Both]:
    limits = {"body_bytes_max": 20_000, "head_bytes_max": 4096, "drain_s": 0.5}
    async with both(engine, topology(), global_={"limits": limits}, regional={"limits": limits}) as running:
        yield running
        await running.at_rest()


async def test_a_request_comes_through_both_tiers(up: Both, engine: Engine) -> None:
    for port in (up.entry, up.client):
        answer = await send(port, chat())
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "hello"
        assert answer.headers["x-farhop-region"] == "virginia"
        assert len(answer.headers["x-farhop-decision"]) == 16
    assert [body["model"] for _, body in engine.seen] == [MODEL, MODEL]


async def test_a_stream_is_asked_for_its_usage_and_keeps_it_to_itself(up: Both, engine: Engine) -> None:
    answer = await send(up.entry, chat(body=streaming()))
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b"usage" not in answer.body
    assert engine.seen[-1][1]["stream_options"] == {"include_usage": True}
    asked = await send(up.entry, chat(body={**streaming(), "stream_options": {"include_usage": True}}))
    assert b'"usage"' in asked.body


async def test_engines_keep_the_caches_of_tenants_apart_that_do_not_share(engine: Engine) -> None:
    """Of equal prompts, whoever does not share gets a salt of its own; a client's own salt is one within it."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    bodies = (asked, {**asked, "cache_salt": "mine"}, {**streaming(), "cache_salt": None})
    salts: dict[str, list[str | None]] = {}
    async with both(engine, topology(tenant("a"), tenant("b"), tenant("shares", share_prefixes=True))) as running:
        for port in (running.entry, running.client):
            for name in ("a", "b", "shares", "anywhere"):
                for body in bodies:
                    assert (await send(port, chat(f"sk-farhop-{name}", body))).status == 200
                seen = [body.get("cache_salt") for _, body in engine.seen[-3:]]
                assert salts.setdefault(name, seen) == seen, "the same through either listener"
        await running.at_rest()
    assert salts["shares"][0] is salts["anywhere"][0] is None
    assert salts["shares"][1] == salts["anywhere"][1] != "mine"
    apart = [salt for name in ("a", "b") for salt in salts[name][:2]] + [salts["shares"][1]]
    assert len(set(apart)) == 5
    assert all(salt is not None and len(salt) == 32 for salt in apart)
    assert [salts[name][2] == salts[name][0] for name in ("a", "b")] == [True, True]


@pytest.mark.parametrize(("stream", "message"), [(False, "hello"), (True, "onetwothree")])
async def test_the_regional_tier_listens_to_what_is_answered_and_the_global_one_does_not(
    up: Both, monkeypatch: pytest.MonkeyPatch, stream: bool, message: str
) -> None:
    fields: dict[str, list[Event]] = {"regional": [], "global": []}
    for tier, flow in (("regional", up.regional.flow), ("global", up.global_.flow)):

        def handle(event: Event, now: float, tier: str = tier, real: Any = flow.handle) -> Any:
            fields[tier].append(event)
            return real(event, now)

        monkeypatch.setattr(flow, "handle", handle)
    talk = [{"role": "user", "content": "x" * 500}]
    turn = [*talk, {"role": "assistant", "content": message}, {"role": "user", "content": "y" * 500}]
    for messages in (talk, turn):
        body = {"model": MODEL, "messages": messages, "stream": stream}
        assert (await send(up.entry, chat(body=body))).status == 200
        await up.at_rest()
    first, second = (event.request for event in fields["regional"] if isinstance(event, RequestArrived))
    ended, _ = (event for event in fields["regional"] if isinstance(event, AttemptEnded))
    assert (len(first.chain), len(ended.chain), ended.answer_bytes) == (1, 2, len(message))  # blocks of 256 bytes
    assert second.chain[:2] == ended.chain
    above = [event for event in fields["global"] if isinstance(event, AttemptEnded)]
    assert [(event.chain, event.answer_bytes) for event in above] == [((), 0)] * 2


@pytest.mark.parametrize(
    ("request_head", "status", "code", "message"),
    [
        (head("GET", "/v1/chat/completions"), 405, "method_not_allowed", "POST"),
        (head("POST", "/v1/models", content_length="0"), 405, "method_not_allowed", "GET, HEAD"),
        (head("POST", "/flush_cache", content_length="0"), 404, "path_not_allowed", "/v1/chat/completions"),
        (head("POST", "/v1/load_lora_adapter", content_length="0"), 404, "path_not_allowed", "inference paths"),
        (head("POST", "/v1/files", content_length="0"), 404, "path_not_allowed", "stateful"),
        (head("POST", "/v1/responses/r1", content_length="0"), 404, "path_not_allowed", "stateful"),
        (head("GET", "/v1/chat/completions/../../metrics"), 404, "path_not_allowed", "inference paths"),
        (head("GET", "/metrics"), 404, "path_not_allowed", "inference paths"),
        (chat(path="/v1/chat/completions?model=another"), 400, "invalid_field", "`model`"),
        (chat(content_encoding="GZIP"), 400, "malformed_http", "Content-Encoding"),
        (head("GET", "/v1/models", x_long="y" * 5000), 431, "head_too_large", "4096 bytes"),
        (chat(body=b"x" * 20_001), 413, "body_too_large", "20000 bytes"),
        (b"nonsense\r\n\r\n", 400, "malformed_http", "HTTP"),
    ],
)
async def test_a_refused_request_is_answered_with_the_reason(
    up: Both, engine: Engine, request_head: bytes, status: int, code: str, message: str
) -> None:
    for port in (up.entry, up.client):
        answer = await send(port, request_head)
        assert (answer.status, answer.code) == (status, code)
        assert message in answer.json["error"]["message"]
        if status == 405:
            assert answer.headers["allow"] == message
    assert engine.seen == []


@pytest.mark.parametrize("coding", ["identity", "IDENTITY", "Identity"])
async def test_content_codings_are_read_in_any_case(up: Both, coding: str) -> None:
    """RFC 9110 §8.4.1."""
    for port in (up.entry, up.client):
        assert (await send(port, chat(content_encoding=coding))).status == 200


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"model": "\xff"}', "invalid_json", None),
        (b"[" * 10_000, "invalid_field", None),
        (b"[]", "invalid_field", None),
        ({"model": MODEL}, "invalid_field", "messages"),
        (
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "inference_geo": "x"},
            "invalid_field",
            "inference_geo",
        ),
        ({"model": 7, "messages": []}, "invalid_field", "model"),
        ({"model": MODEL, "messages": []}, "invalid_field", "messages"),
        ({"model": MODEL, "messages": "hello"}, "invalid_field", "messages"),
        ({"model": MODEL, "messages": [{"content": "x"}]}, "invalid_field", "messages[0].role"),
        ({"model": MODEL, "messages": [{"role": "u", "content": 5}]}, "invalid_field", "messages[0].content"),
        ({**streaming(), "max_tokens": "many"}, "invalid_field", "max_tokens"),
        ({**streaming(), "max_tokens": -2}, "invalid_field", "max_tokens"),
        ({**streaming(), "stream": "maybe"}, "invalid_field", "stream"),
    ],
)
async def test_a_body_that_cannot_be_routed_names_the_field(
    up: Both, engine: Engine, body: Any, code: str, param: str | None
) -> None:
    answer = await send(up.entry, chat(body=body))
    assert (answer.status, answer.code) == (400, code)
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["param"] == param
    assert engine.seen == []


async def test_names_of_unknown_fields_are_not_kept(up: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, count = list[Any](), RequestReader.count_unknown

    def counting(reader: RequestReader, context: Any) -> None:
        contexts.append(context)
        count(reader, context)

    monkeypatch.setattr(RequestReader, "count_unknown", counting)
    assert (await send(up.entry, chat(body={**streaming(), "odd_field": 1}))).status == 200
    assert [context.unknown_fields for context in contexts] == [[], []]


async def test_models_are_listed_in_openais_shape(up: Both) -> None:
    for port in (up.entry, up.client):
        answer = await send(port, head("GET", "/v1/models", authorization="Bearer sk-farhop-anywhere"))
        assert answer.status == 200
        assert answer.json == {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "farhop"}],
        }


async def test_headers_of_our_own_do_not_pass_from_or_to_a_client(up: Both, engine: Engine) -> None:
    sent = {
        "x_farhop_hop": "v1.k1.forged.x",
        "x_farhop_lawful": "cn",
        "x_farhop_outcome": "served",
        "accept_language": "ga",
        "x_mine": "7",
    }
    for port in (up.entry, up.client):
        answer = await send(port, chat(**sent))
        assert answer.status == 200  # a client's hop token is ignored, and is no offence
        ours = {name for name in answer.headers if name.startswith("x-farhop-")}
        assert ours <= {"x-farhop-region", "x-farhop-decision"} | ({"x-farhop-replica"} if port == up.client else set())
        got, _ = engine.seen[-1]
        assert got["accept-language"] == "ga"
        assert "x-mine" not in got, "what engines may see of a head is an allow-list"
        assert not [name for name in got if name.startswith("x-farhop-")]
        assert "authorization" not in got


async def test_a_request_cut_short_or_left_is_counted_once(up: Both, engine: Engine) -> None:
    """in_flight returns to 0 however a request ends before it is relayed: the fixture asserts it."""
    before = _requests(up)
    _, writer = await asyncio.open_connection("127.0.0.1", up.entry)
    writer.write(chat()[:-5])
    await until(lambda: up.global_.metrics.in_flight == 1)
    writer.close()
    await until(lambda: up.global_.metrics.in_flight == 0)
    assert _requests(up) == before + 1
    chunked = head(
        "POST", "/v1/chat/completions", transfer_encoding="chunked", authorization="Bearer sk-farhop-anywhere"
    )
    answer = await send(up.entry, chunked + b"5555\r\n" + b"x" * 0x5555 + b"\r\n0\r\n\r\n")
    assert answer.status == 413
    await until(lambda: up.global_.metrics.in_flight == 0)
    assert _requests(up) == before + 2
    assert engine.seen == []


async def test_a_bug_in_the_ingress_is_counted_and_answered(up: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))

    def broken(*_args: object) -> None:
        raise ZeroDivisionError("the prompt must not be told")

    monkeypatch.setattr(up.global_.reader, "read", broken)
    answer = await send(up.entry, chat())
    assert (answer.status, answer.code) == (500, "internal_error")
    assert b"ZeroDivision" not in answer.body
    assert [type(context["exception"]) for context in seen] == [ZeroDivisionError]
    await until(lambda: up.global_.metrics.in_flight == 0)


def _requests(up: Both) -> int:
    text = up.global_.metrics.render().decode()
    return int(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("farhop_requests_total{")))


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (None, ()),
        (b"eu", ("eu",)),
        (b" eu ,\tjp", ("eu", "jp")),
        (b"", None),
        (b"eu,", None),
        (b",", None),
        (b"eu jp", None),
        (b"eu;jp", None),
        (b"-eu", None),
        ("eü".encode("latin-1"), None),
        (b"e\x00u", None),
        (b"a" * 64, ("a" * 64,)),
        (b"a" * 65, None),
        (b",".join([b"a"] * NARROW_PLACES_MAX), ("a",) * NARROW_PLACES_MAX),
        (b",".join([b"a"] * (NARROW_PLACES_MAX + 1)), None),
        (b",".join([b"a" * 60] * 20), None),
    ],
)
def test_the_places_of_an_allow_header_are_read(value: bytes | None, places: tuple[str, ...] | None) -> None:
    assert narrow_of(value) == places


def _in_trailer() -> bytes:
    body = chat().partition(b"\r\n\r\n")[2]
    chunks = b"%x\r\n%b\r\n0\r\nX-Farhop-Allow: eu\r\n\r\n" % (len(body), body)
    sent = head("POST", "/v1/chat/completions", transfer_encoding="chunked", authorization="Bearer sk-farhop-anywhere")
    return sent + chunks


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (lambda: chat().replace(b"host: ", b"x_farhop_allow: eu\r\nhost: "), "the header's name is `x-farhop-allow`"),
        (lambda: chat(path="/v1/chat/completions?x-farhop-allow=eu"), "must be the header `x-farhop-allow`"),
        (_in_trailer, "`x-farhop-allow` must be a header"),
    ],
    ids=["underscores", "query", "trailer"],
)
async def test_a_residency_that_would_not_be_read_is_refused(
    up: Both, engine: Engine, where: Callable[[], bytes], said: str
) -> None:
    """Left out it would widen what the client asked for."""
    for port in (up.entry, up.client):
        answer = await send(port, where())
        assert answer.status == 400
        assert said in answer.json["error"]["message"]
    assert engine.seen == []


async def test_the_longest_wish_still_fits_into_a_hop_token(up: Both) -> None:
    """Beyond it the token could not be signed, which would be our fault, not the client's."""
    wish = ",".join(["virginia", *(f"{'p' * 50}{n:02d}" for n in range(19))])
    assert NARROW_BYTES_MAX - 60 < len(wish) <= NARROW_BYTES_MAX
    answer = await send(up.entry, chat(x_farhop_allow=wish))
    assert answer.status == 200
    too_long = await send(up.entry, chat(x_farhop_allow=wish + "," + "q" * 60))
    assert (too_long.status, too_long.json["error"]["param"]) == (400, "x-farhop-allow")


def test_the_law_that_a_request_came_under_forbids_by_what_is_learned_of_bases_while_its_body_came() -> None:
    bound = law().topology.tenants["anyone"]
    ruled = replace(bound, models={"base": Rule(allow=("JP",))})
    arrival_law = Law(replace(law().topology, tenants={"anyone": ruled}))
    now = law(2).knowing({MODEL: frozenset({"base"})})
    assert within_arrival_law(request("a", model=MODEL), arrival_law, law(2)).lawful == frozenset(
        arrival_law.topology.regions
    )
    assert within_arrival_law(request("a", model=MODEL), arrival_law, now).lawful == frozenset({"tokyo"})


async def test_a_pipelined_pair_is_answered_in_order(up: Both) -> None:
    first = chat(body={"model": "absent", "messages": [{"role": "user", "content": "x"}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", up.entry)
    writer.write(first.replace(b"connection: close\r\n", b"") + chat())
    async with asyncio.timeout(60.0):
        wire = await reader.read()
    writer.close()
    assert wire.count(b"HTTP/1.1 ") == 2
    assert wire.index(b"HTTP/1.1 404") < wire.index(b"HTTP/1.1 200")
    document = wire[wire.index(b"{") : wire.index(b"HTTP/1.1 200")]
    assert msgspec.json.decode(document)["error"]["code"] == "model_not_found"


async def test_client_latency_is_measured_once_per_connection_if_configured(engine: Engine) -> None:
    async with both(engine, topology(), global_={"client_latencies": {}}) as running:
        seen: list[tuple[str, int]] = []
        assert running.global_.latencies is not None
        running.global_.latencies.table.take = lambda host, rtt_us, _now: seen.append((host, rtt_us))  # type: ignore[method-assign]
        for _ in range(2):
            assert (await send(running.entry, chat() + chat())).status == 200
        await running.at_rest()
        await until(lambda: len(seen) == 2)
    assert {host for host, _ in seen} == {"127.0.0.1"}
    assert all(0 < rtt_us < 10_000_000 for _, rtt_us in seen)


async def test_a_body_read_as_json_is_forwarded_as_json(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it next may go by its `Content-Type`: LiteLLM's proxy finds another model in the same bytes, where
    it is told of a form. curl's `-d` and Python's urllib say one, so it is not refused."""
    between: list[bytes] = []
    reads = RequestReader._request

    def request(self: RequestReader, *given: Any) -> Any:
        if self.to_engines:
            between.append(given[3])  # the header lines with which it came to the region
        return reads(self, *given)

    monkeypatch.setattr(RequestReader, "_request", request)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "&model=big&"}], "max_tokens": 8}
    large = {**asked, "user": "u" * 300_000}
    form, said = b"Content-Type: application/x-www-form-urlencoded\r\n", b"Content-Type: application/json\r\n"
    async with both(engine, topology()) as up:
        for body in (asked, {**asked, "stream": True}, large):
            for lines in (
                b"", form, said, said + form, form + said, b"Content-Type: text/plain\r\n",
                b"Content-Type: application/json; charset=utf-8\r\n",
                b"Content-Type: multipart/form-data; boundary=b\r\n",
                form + b"Accept: content-type: application/json\r\n",
            ):  # fmt: skip
                start, _, rest = chat(body=body).partition(b"\r\n")
                for port in (up.entry, up.client):
                    between.clear()
                    assert (await send(port, start + b"\r\n" + lines + rest)).status == 200
                    assert engine.seen[-1][0]["content-type"] == "application/json", lines
                    told = [line for line in between[0].split(b"\r\n") if line.startswith(b"content-type:")]
                    assert port == up.client or told == [b"content-type: application/json"], lines
        await up.at_rest()
