"""The requests that a benchmark sends: OpenAI chat bodies of a given size, many, with shared beginnings.

Every proxy is sent the same ones. Pure: the same arguments give the same bytes.
"""

from __future__ import annotations

import random
from functools import lru_cache

import msgspec

MODEL = "bench"
KEY = "sk-farhop-bench"
PATH = "/v1/chat/completions"
COUNT = 64
NUMBER = "0000000000"  # the end of each prompt: a run whose prompts shall all differ puts a number there
_TOPICS = 8  # of which each has COUNT / _TOPICS bodies that begin alike
_SHARED, _TOPIC = 0.2, 0.5  # of the text: what all have in common, and what a topic's bodies have
_WORDS = ("region", "replica", "cache", "prefix", "token", "queue", "wait", "hop", "law", "trace", "batch", "decode")


def plain(size: int, count: int = COUNT, model: str = MODEL) -> list[bytes]:
    """Bodies of `size` bytes each (a few hundred at least) that ask for an answer in one piece."""
    return [_body(size, i, {"max_tokens": 128}, "", model) for i in range(count)]


def streamed(
    size: int, chunks: int, pace_ms: float, count: int = COUNT, model: str = MODEL, delay_ms: float = 0.0
) -> list[bytes]:
    """Bodies that ask for a stream. What the upstream of a benchmark should do stands in the text: routers read the
    body into types of their own, and only text is sure to arrive as it was sent."""
    options = {"max_tokens": chunks, "stream": True, "stream_options": {"include_usage": True}}
    order = f" chunks={chunks} pace_ms={pace_ms:g}" + (f" delay_ms={delay_ms:g}" if delay_ms else "")
    return [_body(size, i, options, order, model) for i in range(count)]


def _body(size: int, index: int, options: dict[str, object], order: str, model: str) -> bytes:
    bare = len(_encoded("", order, options, model))
    length = max(0, size - bare)
    system, topic = int(length * _SHARED), int(length * _TOPIC)
    own = length - system - topic
    text = _text("topic", index % _TOPICS, topic) + _text("own", index, max(0, own - len(NUMBER))) + NUMBER
    return _encoded(_text("system", 0, system), text + order, options, model)


def _encoded(system: str, user: str, options: dict[str, object], model: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return msgspec.json.encode({"model": model, "messages": messages, **options})


@lru_cache(maxsize=256)  # what bodies share is made once, and a proxy's bodies are the next one's, too
def _text(kind: str, index: int, length: int) -> str:
    rng = random.Random(f"{kind} {index}")
    return "".join(f"{word}{rng.getrandbits(16)} " for word in rng.choices(_WORDS, k=length // 4 + 1))[:length]


def request(body: bytes, host: str) -> bytes:
    """The whole request on the wire."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
