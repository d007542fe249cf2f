"""What routing needs of a body, whatever its kind, and what all readers of bodies share.

A reader turns a body into a Prompt or raises a BodyError that names the field. Never holds on to a body.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import xxhash

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.relay.formats.lenient import count

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Bytes that UTF-8 never uses (RFC 3629 §1), so that no text can imitate them and no two prompts collide.
ITEM, FIELD, PART, MEDIA, TOOLS, TOKENS, PAIR = (bytes((0xFF - i,)) for i in range(7))

ASSISTANT_TURN = ITEM + b"assistant" + FIELD  # what a chat's answer begins with in the next turn

NO_OUTPUT = 0  # `max_tokens` of what generates nothing
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # no answer is longer; JSON has integers that nothing else can carry

_sorted_json = msgspec.json.Encoder(order="deterministic")


def json_decoder(shape: type[T]) -> Callable[[bytes | memoryview], T]:
    """Reads JSON whose numbers were looked at (shape.once) into `shape`, and takes as long for one fraction as for
    another: msgspec's own way takes 14 us for such as `9e307`, Python's 0.6. Raises msgspec's errors."""
    return msgspec.json.Decoder(shape, float_hook=float).decode


def fraction(text: str) -> float:
    """A number with a fraction or an exponent. Raises ValueError for one beyond all doubles: some readers take it for
    infinite, which may end an engine, and some refuse it."""
    value = float(text)
    if not isfinite(value):
        raise ValueError("Number out of range")
    return value


any_json: Callable[[bytes | memoryview], Any] = msgspec.json.Decoder(float_hook=fraction).decode
"""The same of whatever it may be, its numbers looked at."""


class BodyError(Exception):
    """A body that cannot be routed. `param` names the field; the text names the remedy."""

    def __init__(self, reason: Outcome, detail: str, param: str | None = None) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.param = reason, detail, param


class AnswerText(msgspec.Struct, frozen=True, gc=False):
    """How a text answer goes on from its prompt: the member that holds it, in a stream's events as in a document, and
    what comes before it in the canonical text of the next turn."""

    key: str
    opening: bytes


class Preferences(msgspec.Struct, frozen=True, gc=False):
    """The fields of a body, beside its prompt, that affect where it goes (farhop.relay.formats.preferences).

    `residency` are the residencies asked for, in lower case, with the names of their fields; `geo` is the one that the
    answer's usage repeats. `cache_key` and `user` may name a session; `tier` is a tier of service by its name.
    """

    residency: tuple[tuple[str, str], ...] = ()
    geo: str = ""
    cache_key: str = ""
    user: str = ""
    tier: str = ""


NO_PREFERENCES = Preferences()


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The facts about a body that routing needs."""

    model: str
    canonical: bytes  # the text that a prefix cache would hold; b"": none
    stream: bool = False
    # The client did not ask for its stream's usage: we ask the engine (openai.change) and hide it.
    hide_usage: bool = False
    max_tokens: int | None = None  # of each answer; None: no limit given, 0: nothing is generated
    cache_salt: str = ""
    # The prompt beyond `canonical` that an engine computes, in bytes of text that cost as much: images, audio, a query
    # repeated for each document. Negative if `canonical` is longer than the text that costs as much (token ids in
    # digits).
    opaque_bytes: int = 0
    # One prompt, and one answer that reports nothing about the prompt: one engine may prefill and another decode.
    divisible: bool = False
    answer: AnswerText | None = None  # how the answer appears in the next turn's text; None: unknown
    has_options: bool = True  # the body may have a member `stream_options`
    has_salt: bool = True  # the body may have a member `cache_salt`
    lacks_model: bool = False  # the body names no model; `model` is the one to write into it
    lacks_store: bool = False  # the body leaves it to the engine whether to store the answer; we tell the engine not to
    preferences: Preferences = NO_PREFERENCES  # fields of the body that bear on where it goes, apart from its prompt
    # It asks for the log probabilities of prompt tokens, so an engine computes the whole prompt, cached or not.
    recomputed: bool = False
    answers: int = 1  # how many answers it asks for, each of up to `max_tokens`


def invalid(param: str, detail: str) -> BodyError:
    """A field that is there and wrong, or missing."""
    return BodyError(outcome.INVALID_FIELD, detail, param)


def output_limit(limit: int | None, param: str) -> int | None:
    """How many tokens an answer may have by its request's `param`: what is more than any has is as many as any may
    have. Raises BodyError."""
    if limit is None:
        return None
    if limit < 1:
        raise invalid(param, f"`{param}` must be at least 1")
    return min(limit, OUTPUT_TOKENS_MAX)


def longest(*values: Any) -> int | None:
    """How many tokens an answer may have, by fields of which engines read different ones, or the first that they
    consider set: the largest of them; None, for no limit, if one is less than 1 (for SGLang 0 means unset, for
    llama.cpp -1 means no limit), or is not a number."""
    most = 0
    for value in values:
        if value is None:
            continue
        known = count(value)
        if known is None or known < 1:
            return None
        most = max(most, known)
    return most or None


def how_many(*values: Any) -> int:
    """How many answers a body asks for by fields of which the most counts: what no engine takes for a number is none.
    Engines read as loosely as this (`"3"`, 3.0, and llama.cpp 3.5 for 3), and refuse the rest themselves."""
    most = 1
    for value in values:
        if value is None or value == 1:
            continue
        known = int(value) if isinstance(value, float) and isfinite(value) else count(value)
        most = max(most, min(known or 1, OUTPUT_TOKENS_MAX))
    return most


class Salted(Protocol):
    """What all bodies say alike that an engine computes. A salt that is not set was not in the body."""

    model: str | None
    cache_salt: str | msgspec.UnsetType | None


def without_output(body: Salted, canonical: bytes, opaque_bytes: int) -> Prompt:
    """The prompt of a body by which nothing is generated: embeddings, rankings."""
    return Prompt(
        body.model or "",
        canonical,
        max_tokens=NO_OUTPUT,
        has_salt=body.cache_salt is not msgspec.UNSET,
        cache_salt=body.cache_salt or "",
        opaque_bytes=opaque_bytes,
    )


class Sized(msgspec.Struct, kw_only=True):
    """What may say beside an API's own limit how many answers there are, and how long: llama.cpp turns bodies of all
    APIs into its own, and these members go with them."""

    max_completion_tokens: int | None = None  # of chats; there it overrides `max_tokens`, as in completions
    n: Any = None  # the engine's to judge
    best_of: Any = None  # of older engines: this many are generated, and `n` of them sent
    n_predict: Any = None  # llama.cpp's own names, which override `max_tokens` and `n` there
    n_cmpl: Any = None


class Generating(Salted, Protocol):
    """The fields that bodies of all text-generating APIs share. See Sized."""

    stream: bool | None
    max_completion_tokens: int | None
    n: Any
    best_of: Any
    n_predict: Any
    n_cmpl: Any


def generated(
    body: Generating,
    canonical_text: tuple[bytes, int],
    limit: tuple[int | None, str],
    answer: AnswerText | None,
    *,
    hide_usage: bool = False,
    has_options: bool = False,
    divisible: bool = False,
    recomputed: bool = False,
    prompts: int = 1,
) -> Prompt:
    """The prompt of such a body. `canonical_text` is `canonical` and `opaque_bytes`, `limit` how many tokens
    the answer may have and the field that says so; `prompts`: how many there are, each answered; the rest is as in
    Prompt. Raises BodyError."""
    canonical, opaque_bytes = canonical_text
    most, param = limit
    other, own = body.max_completion_tokens, body.n_predict
    if most is not None and (own is not None or other is not None) and most > 0:
        most = longest(most, other, own)
    alone = body.n is None and body.best_of is None and body.n_cmpl is None
    return Prompt(
        model=body.model or "",
        canonical=canonical,
        stream=bool(body.stream),
        hide_usage=hide_usage,
        max_tokens=most if most is None or 0 < most <= OUTPUT_TOKENS_MAX else output_limit(most, param),
        cache_salt=body.cache_salt or "",
        opaque_bytes=opaque_bytes,
        divisible=divisible,
        answer=answer,
        has_options=has_options,
        has_salt=body.cache_salt is not msgspec.UNSET,
        recomputed=recomputed,
        answers=prompts if alone else prompts * how_many(body.n, body.best_of, body.n_cmpl),
    )


def header(lines: bytes, name: bytes) -> bytes | None:
    """The value of a header that may occur once; None if it is missing. `name` is in lower case. Raises BodyError if it
    occurs twice.
    """
    start = name + b": "
    values = [line[len(start) :] for line in lines.split(b"\r\n") if line.startswith(start)]
    if len(values) > 1:
        raise invalid(name.decode(), f"header `{name.decode()}` may stand once only")
    return values[0] if values else None


def in_order(value: Any) -> bytes:
    """JSON in which the order of keys does not matter."""
    return _sorted_json.encode(value)


def medium(value: Any) -> tuple[bytes, int]:
    """A content part other than text (an image, audio): its hash, and its size in bytes."""
    blob = in_order(value)
    return MEDIA + xxhash.xxh3_128_hexdigest(blob).encode(), len(blob)
