"""When a prompt is tokenized: at once, before its request is decided on, in parallel, or not at all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from farhop.balance.machine import Event, PromptTokenized, Request, Tokens
from farhop.relay.formats import openai
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import Prompt
from farhop.service.admission import prompt_tokens
from farhop.service.admission.prompt_tokens import PromptTokens
from farhop.service.tokenization.tokenizer import INLINE_BYTES_MAX

SHORT, LONG = b"x" * INLINE_BYTES_MAX, b"x" * (INLINE_BYTES_MAX + 1)
ALL, HEAD = Tokens(b"all.", "", "chat"), Tokens(b"head", "", "chat", whole=False)
NOW = 7.0


class Read:
    """Tokenizers that read what they are told to, and a relay that holds what was started."""

    def __init__(self, beginning: Tokens | None = HEAD, *, busy: bool = False, sent: bool = False) -> None:
        self.asked: list[str] = []
        self.started: list[tuple[Tokens | None, float]] = []
        self.told: list[Event] = []
        self.later: asyncio.Future[Tokens | None] = asyncio.get_running_loop().create_future()
        self._beginning, self._busy, self._sent = beginning, busy, sent
        self._request: Any = Request(
            id="r", tenant="t", model="m", prompt_bytes=9, body_bytes=9, chain=(), deadline=9.0
        )

    def reads(self, kind: Kind, model: str) -> bool:
        return (kind, model) == (Kind.CHAT, "m")

    def now(self, *_: Any) -> Tokens:
        self.asked.append("now")
        return ALL

    def beginning(self, *_: Any) -> Tokens | None:
        self.asked.append("beginning")
        return self._beginning

    def holds(self, request_id: str) -> bool:
        return request_id == "r" and not self._sent

    def react(self, event: Event, now: float | None = None) -> None:
        self.told.append(event)

    def start_with_tokens(self, body: bytes, wanted: Any, since: float = 0.0) -> None:
        def later(*_: Any, waits: bool = True) -> asyncio.Future[Tokens | None] | None:
            self.asked.append("later" if waits else "beside")
            return None if self._busy else self.later

        tokenizers: Any = SimpleNamespace(reads=self.reads, now=self.now, beginning=self.beginning, later=later)
        clock: Any = SimpleNamespace(now=lambda: NOW)
        made = PromptTokens(tokenizers, wanted, clock, SimpleNamespace())  # type: ignore[arg-type]
        caller: Any = SimpleNamespace(hint_scope="")
        exchange: Any = SimpleNamespace(
            body=body, callbacks=None, context=SimpleNamespace(kind=Kind.CHAT, caller=caller), reply=pytest.fail
        )
        prompt: Any = SimpleNamespace(cache_salt="")
        made.start_with_tokens(exchange, self._request, prompt, since, self._start, self)
        self.made, self.caller, self.prompt, self.request = made, caller, prompt, self._request

    def _start(self, request: Request, since: float) -> None:
        self.started.append((request.tokens, since))


async def test_a_short_prompt_is_tokenized_at_once() -> None:
    read = Read()
    read.start_with_tokens(SHORT, lambda _: True, since=3.0)
    assert (read.asked, read.started) == (["now"], [(ALL, 3.0)])


@pytest.mark.parametrize("beginning", [HEAD, None])
async def test_a_long_prompt_waits_for_all_its_tokens_if_its_beginning_does_not_decide(
    beginning: Tokens | None,
) -> None:
    read = Read(beginning)
    read.start_with_tokens(LONG, lambda _: True)
    assert (read.asked, read.started) == (["beginning", "later"], [])
    read.later.set_result(ALL)
    await asyncio.sleep(0)
    assert read.started == [(ALL, NOW)], "it would have begun when it came"


async def test_a_prompt_that_cannot_be_tokenized_in_time_continues_without_tokens() -> None:
    read = Read()
    read.start_with_tokens(LONG, lambda _: True, since=3.0)
    read.later.set_result(None)
    await asyncio.sleep(0)
    assert read.started == [(None, 3.0)]
    busy = Read(busy=True)
    busy.start_with_tokens(LONG, lambda _: True)
    assert (busy.asked, busy.started) == (["beginning", "later"], [(None, 0.0)])


@pytest.mark.parametrize("whole", [False, True])
async def test_rest_of_the_tokens_follows_if_the_beginning_decides(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(prompt_tokens, "_BESIDE_S", 0.0)
    read = Read(Tokens(b"head", "", "chat", whole=whole))
    read.start_with_tokens(LONG, lambda request: request.tokens is None)
    assert [tokens is not None and tokens.ids for tokens, _ in read.started] == [b"head"]
    read.later.set_result(ALL)
    for _ in range(3):
        await asyncio.sleep(0)
    assert read.asked == ["beginning"] if whole else ["beginning", "beside"]
    assert read.told == ([] if whole else [PromptTokenized("r", ALL)])


@pytest.mark.parametrize(("body", "how"), [(SHORT, "now"), (LONG, "beside")])
@pytest.mark.parametrize("came", [ALL, None, "closed"])
async def test_tokens_of_a_queued_prompt_are_given_to_the_machine(body: bytes, how: str, came: Any) -> None:
    read = Read()
    read.start_with_tokens(body, lambda _: False)
    assert (read.asked, read.started) == ([], [(None, 0.0)])
    if came == "closed":
        read.later.cancel()
    else:
        read.later.set_result(came)
    for _ in range(3):
        await asyncio.sleep(0)
    assert read.asked == [how]
    assert read.told == ([PromptTokenized("r", ALL)] if came is ALL or how == "now" else [])


async def test_tokens_of_a_request_already_sent_are_not_needed() -> None:
    read = Read(sent=True)
    read.start_with_tokens(SHORT, lambda _: False)
    await asyncio.sleep(0)
    assert (read.asked, read.started) == ([], [(None, 0.0)])


async def test_an_explain_request_is_tokenized_at_once_however_long() -> None:
    read = Read()
    read.start_with_tokens(SHORT, lambda _: True)
    for kind, tokens in ((Kind.CHAT, ALL), (Kind.EMBEDDINGS, None)):
        assert read.made.now(read.caller, kind, read.request, read.prompt, LONG).tokens is tokens


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION, Kind.MESSAGES])
def test_blocks_are_looked_up_by_the_salt_that_engines_are_sent(kind: Kind) -> None:
    """Of a tenant whose prompts are its own, none is found that another tenant had cached without a salt."""
    salts: list[str] = []

    def now(_kind: Kind, _model: str, _body: bytes, salt: str) -> Tokens:
        salts.append(salt)
        return ALL

    tokenizers: Any = SimpleNamespace(reads=lambda *_: True, now=now)
    made = PromptTokens(tokenizers, lambda _: True, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    caller: Any = SimpleNamespace(hint_scope="tenant:ours")
    prompt = Prompt("m", b"hi")
    asked = Request(id="r", tenant="ours", model="m", prompt_bytes=2, body_bytes=9, chain=(), deadline=9.0)
    made.now(caller, kind, asked, prompt, b"{}")
    assert salts == [openai.salt_of(kind, prompt, "tenant:ours")] != [""]
