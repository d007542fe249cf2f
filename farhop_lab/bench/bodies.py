"""The requests that a benchmark sends: many OpenAI chat bodies of a given size, with shared beginnings.

Every proxy gets the same ones. Pure: the same arguments give the same bytes.
"""

from __future__ import annotations

import random
from functools import lru_cache

import msgspec

MODEL = "bench"
KEY = "sk-farhop-bench"
PATH = "/v1/chat/completions"
COUNT = 64
NUMBER = "0000000000"  # the end of each prompt: a run whose prompts must all differ puts a number there
_TOPICS = 8  # each has COUNT / _TOPICS bodies with a common beginning
_SHARED, _TOPIC = 0.2, 0.5  # shares of the text: common to all bodies, and common to a topic's
# As many characters that JSON escapes, and as many outside ASCII, as chats have. 17,671 conversations of ShareGPT (V3,
# "unfiltered cleaned split", 114 MB of text) have in 1,000 bytes 13.0 line ends, 3.7 quotes, 1.5 backslashes and 3.1
# bytes outside ASCII, the latter in one in seven of the texts of 2 KB and more; two in a thousand of these have nothing
# to escape. So this share of the words is followed by a line end, quoted, or followed by a backslash; accents are in
# one topic of eight.
_LINES, _QUOTED, _BACKSLASHES, _ACCENTS = 0.15, 0.021, 0.017, 0.1
_ACCENTED = ("r\u00e9gion", "\u2019cache", "Stra\u00dfe", "\u4f60\u597d", "\u2013", "\u0434\u043e\u043c")
_WORDS = ("region", "replica", "cache", "prefix", "token", "queue", "wait", "hop", "law", "trace", "batch", "decode")


def plain(size: int, count: int = COUNT, model: str = MODEL, delay_ms: float = 0.0) -> list[bytes]:
    """Bodies of `size` bytes each (a few hundred at least) that ask for an answer in one piece, after `delay_ms`."""
    return [_body(size, i, {"max_tokens": 128}, _delayed(delay_ms), model) for i in range(count)]


def streamed(
    size: int, chunks: int, interval_ms: float, count: int = COUNT, model: str = MODEL, delay_ms: float = 0.0
) -> list[bytes]:
    """Bodies that ask for a stream. Instructions for the benchmark's upstream are in the text: routers parse the body
    into types of their own, and only text is sure to arrive as it was sent.
    """
    options = {"max_tokens": chunks, "stream": True, "stream_options": {"include_usage": True}}
    order = f" chunks={chunks} interval_ms={interval_ms:g}" + _delayed(delay_ms)
    return [_body(size, i, options, order, model) for i in range(count)]


def _delayed(delay_ms: float) -> str:
    return f" delay_ms={delay_ms:g}" if delay_ms else ""


def _body(size: int, index: int, options: dict[str, object], order: str, model: str) -> bytes:
    bare = len(_encoded("", order, options, model))
    length = max(0, size - bare)
    system, topic = int(length * _SHARED), int(length * _TOPIC)
    own = length - system - topic
    accents = index % _TOPICS == 0
    text = _text("topic", index % _TOPICS, topic, accents) + _text("own", index, max(0, own - len(NUMBER)), accents)
    return _encoded(_text("system", 0, system, False), text + NUMBER + order, options, model)


def _encoded(system: str, user: str, options: dict[str, object], model: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return msgspec.json.encode({"model": model, "messages": messages, **options})


@lru_cache(maxsize=256)  # what bodies share is made once, for all proxies
def _text(kind: str, index: int, length: int, accents: bool) -> str:
    """A text that takes this many bytes in JSON."""
    rng = random.Random(f"{kind} {index}")
    pieces: list[str] = []
    while True:
        word = rng.choice(_ACCENTED if accents and rng.random() < _ACCENTS else _WORDS) + str(rng.getrandbits(16))
        if rng.random() < _QUOTED:
            word = f'"{word}"'
        if rng.random() < _BACKSLASHES:
            word += "\\"
        piece = word + ("\n" if rng.random() < _LINES else " ")
        left = length - (len(msgspec.json.encode(piece)) - 2)
        if left < 0:
            return "".join(pieces) + "x" * length
        pieces.append(piece)
        length = left


def request(body: bytes, host: str) -> bytes:
    """The whole request on the wire."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
