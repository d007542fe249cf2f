"""Whatever form a body has that a real engine takes: both tiers take it, and read it as that engine does."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest
from forms import CHAT, FORMS
from inprocess import Answer, Both, chat
from real import RealEngine, send, tiers

from farhop.relay.formats import bodies
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError, Prompt

pytestmark = pytest.mark.engines

# Requests that some engine accepts and Farhop refuses, and why.
TWICE = "of two readers one takes the first and one the last: what is decided by one another would answer"
NO_JSON = "JSON is Unicode in UTF-8 (RFC 8259, section 8): other engines, and who reads it on the way, refuse it"
CUT = "llama.cpp cuts the fraction off, vLLM refuses it: a count has none"
OPTIONS = "llama.cpp passes over what is no mapping, vLLM refuses it; usage is asked for in it"
NAMES = "names are texts: llama.cpp does not look at them, vLLM refuses these"
UNNAMED = "several models are served here, and the law may differ by model"
IDS = "token ids are not built, their digits are the chain: they have one form"
NOTHING = "a mapping is no list of parts: it says nothing that could be read"
REFUSED = {
    "max_tokens 6.5": CUT,
    "stream_options []": OPTIONS,
    "stream_options 1": OPTIONS,
    "a zero byte behind": NO_JSON,
    "nested 3000 deep": "who reads it on the way bounds its own stack",
    "messages []": "nothing is said that could be routed by; vLLM refuses it",
    "model 5": NAMES,
    "cache_salt 5": NAMES,
    'prompt ""': "nothing is said that could be routed by; vLLM refuses it",
    'prompt ["a",5]': "a text of texts and ids has no beginning that others share; vLLM refuses it",
    'prompt ["a",[11]]': "prompts are of one kind, texts or ids; vLLM refuses a list of both",
    "max_tokens twice": TWICE,
    "a key twice in a message": TWICE,
    "UTF-16": NO_JSON,
    "half a pair in what nobody reads": NO_JSON,
    "content {}": NOTHING,
    "model null": UNNAMED,
    'model ""': UNNAMED,
    "no model": UNNAMED,
    "prompt [1.0]": IDS,
}


# Requests that an engine refuses and gets in another form: Farhop requests the usage that the client does not.
WRITTEN_ANEW = ("include_usage 0", 'include_usage "false"')


class ObservedReading(NamedTuple):
    """What can be told from outside of how a body was read."""

    taken: bool
    streams: bool
    texts: int
    tokens: int

    @classmethod
    def of(cls, answer: Answer) -> ObservedReading:
        """From an answer, whole or as a stream."""
        if answer.status != 200:
            return cls(False, False, 0, 0)
        streams = answer.headers.get("content-type", "").startswith("text/event-stream")
        if streams:
            return cls(True, True, 0, 0)
        usage = answer.json.get("usage") or {}
        return cls(True, False, len(answer.json["choices"]), usage.get("completion_tokens", 0))


def read(path: str, body: bytes) -> Prompt | None:
    """As both tiers read it; None for what they refuse."""
    kind = Kind.CHAT if path == CHAT else Kind.COMPLETION
    try:
        return bodies.read(kind, bodies.without_bom(kind, body), path.encode(), default_model=lambda: "tiny")
    except BodyError:
        return None


async def asked(port: int, path: str, body: bytes, key: str | None) -> Answer:
    return await send(port, chat(key=key, body=body, path=path, content_type="application/json"))


async def differences(both: Both, engine: RealEngine) -> dict[str, Any]:
    """By form: how an engine that was asked directly took it, and how it was taken through both tiers."""
    port, found = int(engine.url.rpartition(":")[2]), dict[str, Any]()
    for name, (path, body) in FORMS.items():
        direct = await asked(port, path, body, None)
        if direct.status >= 500:
            await asyncio.to_thread(engine.ready)  # it has received a request that kills it
        through = await asked(both.entry, path, body, "sk-farhop-anywhere")
        there, here, prompt = ObservedReading.of(direct), ObservedReading.of(through), read(path, body)
        wrong = there != here
        if there.taken and prompt is not None:
            most = prompt.max_tokens
            wrong |= prompt.stream != there.streams or there.texts > prompt.answers
            # For zero tokens vLLM computes one all the same, and says so.
            wrong |= most is not None and there.tokens > max(1, most) * prompt.answers
        if wrong:
            found[name] = (direct.status, through.status, there, here, direct.body[:160], through.body[:160])
    return found


@pytest.mark.parametrize("kind", ["vllm", "llama"])
async def test_forms_are_read_as_the_engine_reads_them(kind: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue("vllms")[0] if kind == "vllm" else request.getfixturevalue("llama")
    async with tiers(engine, tokenizer=kind == "vllm") as both:
        found = await differences(both, engine)
    for name, what in found.items():
        print(name, *what, sep="\n    ")
    assert {name: what for name, what in found.items() if name not in (*REFUSED, *WRITTEN_ANEW)} == {}
    assert all(
        what[1] == 400 for name, what in found.items() if name in REFUSED
    )  # with the field's name, and nothing half understood
