"""What a chunk costs more if its stream can be continued: CPU time of the tap alone, with and without, in turn.

The same build and the same chunks, as vLLM writes them, with ids if ids are wanted; rounds of each kind alternate, so
that a machine that becomes slower does so for all. Other costs of a chunk (sockets, framing, both tiers) are the same
for all kinds and not in these numbers; nor are the 20 bytes that an id adds on the wire.
"""

from __future__ import annotations

import gc
import statistics
import time

import msgspec

from farhop.relay.formats.exact_resumption import ExactProgress, HopProgress
from farhop.relay.formats.resumption import CHAT, plan
from farhop.relay.formats.text_resumption import TextProgress
from farhop.relay.upstream.resumable import ExactTap, Resumption, TextTap
from farhop.relay.upstream.tap import StreamTap

CHUNKS, ROUNDS = 20_000, 15
_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": CHUNKS + 1}


class ChunkCost(msgspec.Struct, frozen=True):
    """One kind: µs of CPU per chunk, the median of the rounds, and how much that is above `off`, round by round."""

    us: float
    more_us: float


def chunk(number: int, *, ids: bool) -> bytes:
    """A token's event as vLLM writes it in a chat; the first one has the prompt's ids."""
    choice = {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
    head = {"id": "chatcmpl-6afc2cc78f904e2bba6ace0248d53eef", "object": "chat.completion.chunk", "created": 1795442388}
    document = {**head, "model": "meta-llama/Llama-3.1-8B-Instruct", "choices": [choice]}
    if ids:
        choice["token_ids"] = [1000 + number % 120_000]
        if not number:
            document["prompt_token_ids"] = list(range(500))
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _tap(kind: str) -> StreamTap:
    if kind == "off":
        return StreamTap(True)
    owner = Resumption(lambda _target, _model: 0)
    if kind == "text":
        body = msgspec.json.encode(_BODY)
        return TextTap(True, None, "", TextProgress(plan(CHAT, body, text=True), body, sends_usage=False), owner)
    body = msgspec.json.encode(_BODY if kind != "exact, stop strings" else {**_BODY, "stop": ["\n\n", "Observation:"]})
    made = HopProgress if kind == "exact, for the tier above" else ExactProgress
    return ExactTap(True, None, "", made(plan(CHAT, body), body), owner)


_WITHOUT_IDS = ("off", "text")
KINDS = ("off", "text", "exact", "exact, for the tier above", "exact, stop strings")


def measure(chunks: int = CHUNKS, rounds: int = ROUNDS) -> dict[str, ChunkCost]:
    """By kind."""
    plain, with_ids = ([chunk(n, ids=ids) for n in range(chunks)] for ids in (False, True))
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    gc.disable()
    try:
        for _ in range(rounds + 1):
            for kind in KINDS:
                feed, events = _tap(kind).feed, plain if kind in _WITHOUT_IDS else with_ids
                began = time.process_time_ns()
                for event in events:
                    feed(event)
                spent[kind].append((time.process_time_ns() - began) / chunks / 1e3)
    finally:
        gc.enable()
    off = spent["off"][1:]  # the first round warms up
    return {
        kind: ChunkCost(
            statistics.median(took[1:]), statistics.median(mine - his for mine, his in zip(took[1:], off, strict=True))
        )
        for kind, took in spent.items()
    }
