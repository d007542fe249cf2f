"""From a caller and a body to the machine's Request, and why not."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from farhop.balance import outcome
from farhop.balance.machine import Request
from farhop.balance.model_facts import UNKNOWN_FACTS, ModelFacts
from farhop.relay import answers
from farhop.relay.formats.bodies import BodyError, HeavyError
from farhop.relay.formats.field_guard import Guard
from farhop.relay.formats.paths import Kind
from farhop.service.admission import large_bodies, request_reader
from farhop.service.admission.request_reader import RefusedError, RequestReader
from farhop.service.authentication.authenticator import Caller

NOW, KNOWN = 100.0, ModelFacts(max_model_len=4096)
ASKER = Caller("t", 30.0, "t", recorded=True, ttft_s=2.0)
REFUSED = answers.refusal(outcome.INVALID_FIELD, "not there", param="inference_geo")


class Door:
    """An authenticator: these models are on offer, and who asks to stay in `eu` does."""

    def __init__(self, *models: str) -> None:
        self._models = dict.fromkeys(models, KNOWN)

    def models(self, _: Caller) -> dict[str, ModelFacts]:
        return self._models

    def with_preferences(self, caller: Caller, preferences: Any, _: bytes) -> Any:
        if not preferences.geo:
            return caller
        return msgspec.structs.replace(caller, narrow=(("eu",),)) if preferences.geo == "eu" else REFUSED


class Names:
    """`short` stands for `m`; `unknown` cannot be looked up."""

    def resolved(self, request: Request, allowed: tuple[str, ...]) -> Request | None:
        if request.model == "unknown":
            raise BodyError(outcome.UNKNOWN_MODEL, "nobody has it", "model")
        return msgspec.structs.replace(request, model="m", alias="short") if request.model == "short" else None

    def listed(self, tenant: str) -> dict[str, tuple[str, ...]]:
        return {"short": ("m",), "gone": ("elsewhere",)}


def reader(*models: str, **more: Any) -> RequestReader:
    clock: Any = SimpleNamespace(now=lambda: NOW)
    door: Any = Door(*models or ("m",))
    return RequestReader(door, clock=clock, rng=Random(1), **more)


def text(model: str | None = "m", content: str = "hello " * 200, **more: Any) -> bytes:
    named = {} if model is None else {"model": model}
    return msgspec.json.encode({**named, "messages": [{"role": "user", "content": content}], **more})


def came(body: bytes, caller: Caller = ASKER, kind: Kind = Kind.CHAT) -> Any:
    """An exchange whose body is here."""
    head = SimpleNamespace(path=b"/v1/chat/completions", onward=b"", known={})
    context = SimpleNamespace(kind=kind, caller=caller, law="a verdict", recorded=True, unknown_fields=[])
    return SimpleNamespace(head=head, body=body, context=context)


def refusal(error: pytest.ExceptionInfo[RefusedError]) -> tuple[str, str | None]:
    said = msgspec.json.decode(error.value.reply.body)["error"]
    return error.value.reply.outcome.reason, said["param"]


def test_a_request_has_its_callers_time_and_its_bodys_sizes() -> None:
    body = text(max_tokens=8, stream=True)
    request, prompt = reader().read(came(body))
    assert (request.tenant, request.model, request.body_bytes, request.stream) == ("t", "m", len(body), True)
    assert (request.deadline, request.first_token_by, request.max_tokens) == (NOW + 30.0, NOW + 2.0, 8)
    assert request.prompt_bytes == len(prompt.canonical)
    assert len(request.chain) > 0


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Kind.MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 8}),
        (Kind.RESPONSES, {"tools": [{"type": "function", "name": "f"}], "input": "hello", "messages": None}),
    ],
)
def test_tools_are_detected_in_every_format(kind: Kind, body: dict[str, Any]) -> None:
    def read(fields: dict[str, Any]) -> Request:
        said = msgspec.json.decode(text()) | fields
        return reader().read(came(msgspec.json.encode({k: v for k, v in said.items() if v is not None}), kind=kind))[0]

    assert (read(body).tools, read({**body, "tools": None}).tools) == (True, False)


def test_both_tiers_hash_alike_and_tenants_that_may_not_share_have_no_node_in_common() -> None:
    alike, other = (msgspec.structs.replace(ASKER, hint_scope=scope) for scope in ("t", "u"))
    chains = [made.read(came(text(), who))[0].chain for made in (reader(), reader(to_engines=True))
              for who in (ASKER, alike, other)]  # fmt: skip
    assert chains[:3] == chains[3:]
    assert chains[0] == chains[1]
    assert not set(chains[0]) & set(chains[2])
    salted = reader().read(came(text(cache_salt="mine")))[0].chain
    assert not set(chains[0]) & set(salted)


def test_the_one_model_there_is_need_not_be_named() -> None:
    assert reader("m").read(came(text(None)))[0].model == "m"
    with pytest.raises(RefusedError) as error:
        reader("m", "n").read(came(text(None)))
    assert refusal(error)[1] == "model"


@pytest.mark.parametrize("read", ["read", "apart", "compose"])
def test_a_residency_field_in_the_body_narrows_the_request_before_the_decision(read: str) -> None:
    def asked(geo: str) -> tuple[Request, Any]:
        body = text(inference_geo=geo)
        exchange, made = came(body), reader()
        if read == "compose":
            return made.compose(ASKER, Kind.CHAT, body)[0], None
        if read == "read":
            return made.read(exchange)[0], exchange.context
        return made.read_apart(exchange, large_bodies.read(made.job(exchange), body), NOW)[0], exchange.context

    request, context = asked("eu")
    assert request.narrow == (("eu",),)
    if context is not None:
        assert (context.caller.narrow, context.law) == ((("eu",),), None), "its verdict was for more"
    with pytest.raises(RefusedError) as error:
        asked("nowhere")
    assert error.value.reply is REFUSED


def test_a_body_read_in_the_other_process_is_read_the_same() -> None:
    body, guard = text(odd_field=1), Guard()
    exchange = came(body, msgspec.structs.replace(ASKER, body_hash=b"another"))
    made = reader(guard=guard, signs=lambda: True, to_engines=True)
    parsed = large_bodies.read(made.job(exchange), body)
    with pytest.raises(RefusedError) as error:
        made.read_apart(exchange, parsed, NOW)
    assert error.value.reply.outcome is outcome.HOP_FORGED
    exchange.context.caller = ASKER
    request, prompt = made.read_apart(exchange, parsed, NOW)
    assert dict(guard.unknown) == {}  # the ingress counts that, once it is known what may be recorded
    assert exchange.context.unknown_fields == ["odd_field"]
    made.count_unknown(exchange.context)
    exchange.context.recorded = False
    made.count_unknown(exchange.context)
    assert dict(guard.unknown) == {"odd_field": 1, "(other)": 1}
    assert exchange.context.body_sha256 == parsed.onward_sha256 != b""
    here, same = reader().read(came(body))
    assert msgspec.structs.replace(request, id=here.id) == here
    assert prompt.canonical == same.canonical


def test_a_body_that_cannot_be_read_is_refused_by_its_field() -> None:
    made, body = reader(), text(max_tokens="many")
    with pytest.raises(RefusedError) as error:
        made.read(came(body))
    assert refusal(error) == ("invalid_field", "max_tokens")
    with pytest.raises(RefusedError) as error:
        made.compose(ASKER, Kind.CHAT, body)
    assert refusal(error) == ("invalid_field", "max_tokens")
    with pytest.raises(RefusedError) as error:
        made.read_apart(came(body), large_bodies.read(made.job(came(body)), body), NOW)
    assert refusal(error) == ("invalid_field", "max_tokens")


def test_a_name_stands_for_another_model_from_body_to_chain() -> None:
    made = reader()
    made.names = Names()
    plain, _ = made.compose(ASKER, Kind.CHAT, text("m"))
    request, prompt = made.compose(ASKER, Kind.CHAT, text("short"))
    assert (request.model, request.alias, prompt.model) == ("m", "short", "m")
    assert (request.chain, request.body_bytes) == (plain.chain, plain.body_bytes), "caches know it by its model"
    body = text("short")
    asked, read = reader().read(came(body))
    found = made.renamed(made.names, ASKER, Kind.CHAT, asked, read, body)
    assert found is not None
    assert msgspec.json.decode(found[2])["model"] == "m"
    chosen = msgspec.structs.replace(ASKER, decision_id="d")
    assert made.renamed(made.names, chosen, Kind.CHAT, asked, read, body) is None, "another balancer chose its model"
    for name, kind, why in (("unknown", Kind.CHAT, "unknown_model"), ("short", Kind.GENERATE, "invalid_field")):
        with pytest.raises(RefusedError) as error:
            made.renamed(made.names, ASKER, kind, msgspec.structs.replace(asked, model=name), read, body)
        assert refusal(error) == (why, "model")


def test_for_another_model_the_chain_is_computed_again_except_for_a_large_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, exchange = reader(), came(text("n"))
    assert made.chain_anew(exchange, text("m")) == made.read(came(text("m")))[0].chain
    assert made.chain_anew(exchange, b"{") == (), "it was let in before, and goes on without"
    monkeypatch.setattr(request_reader, "LARGE_BYTES", 100)
    assert made.chain_anew(exchange, text("m")) == ()


def test_models_are_those_on_offer_and_the_names_that_stand_for_them() -> None:
    made = reader("z", "m")
    assert list(made.models(ASKER)) == ["m", "z"]
    made.names = Names()
    assert made.models(ASKER) == {"m": KNOWN, "short": UNKNOWN_FACTS, "z": KNOWN}
    assert "short" not in made.models(msgspec.structs.replace(ASKER, models=("m",)))


def test_heavy_bodies_go_to_the_other_process_if_there_is_one() -> None:
    """Only where others wait: what a body would be, once and unasked, is read here."""
    parts = [{"type": "text", "text": ""}] * 3000
    heavy = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": parts}]})
    beside: Any = SimpleNamespace()
    with pytest.raises(HeavyError):
        reader(large=beside).read(came(heavy))
    assert reader(large=beside).chain_anew(came(heavy), heavy) == ()
    assert reader().read(came(heavy))[0].body_bytes == len(heavy)
    assert reader().chain_anew(came(heavy), heavy)
    assert reader(large=beside).compose(ASKER, Kind.CHAT, heavy)[0].body_bytes == len(heavy)
