"""An engine's KV events, step by step, in vLLM's format: blocks stored, removed, all cleared.

Pure. Invariants: a block is logged as stored once, when it is named, and as removed once, when it is evicted; the ids
of its tokens are its text, TOKEN_BYTES each (as in /tokenize, or the tokenizer's own); the adapter that it was computed
with is beside it, and among its extra keys; a step without change logs nothing. Never publishes; kv_publisher does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.engine.core.text import TOKEN_BYTES

if TYPE_CHECKING:
    from farhop_lab.engine.core.sequence import Sequence

_ORDER = {  # vLLM up to 0.23 sent arrays: the fields in its order
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
SCHEMAS = ("map", "array")


class KvLog:
    """The events of one engine since they were last taken."""

    __slots__ = ("_adapters", "_block_tokens", "_events")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._events: list[dict[str, Any]] = []
        self._adapters: dict[str, int] = {}  # by name, their numbers as they came, from 1

    def stored(self, sequence: Sequence, first: int, fresh: list[bool]) -> None:
        """The sequence's blocks from number `first` on were just named; those `fresh` had not been held."""
        names = sequence.block_names(first + len(fresh))
        at = 0
        while at < len(fresh):
            end = at
            while end < len(fresh) and fresh[end]:
                end += 1
            if end > at:
                self._run(sequence, names, first + at, first + end)
            at = end + 1

    def _run(self, sequence: Sequence, names: list[int], first: int, end: int) -> None:
        size = self._block_tokens * TOKEN_BYTES
        text = bytes(sequence.text[first * size : end * size])
        adapter = sequence.adapter
        extra: list[list[str] | None] = [[adapter] if adapter else None for _ in range(first, end)]
        if first == 0 and sequence.cache_salt:
            extra[0] = [*(extra[0] or ()), sequence.cache_salt]
        self._events.append({
            "type": "BlockStored",
            "block_hashes": names[first:end],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": [int.from_bytes(text[i : i + TOKEN_BYTES], "big") for i in range(0, len(text), TOKEN_BYTES)],
            "block_size": self._block_tokens,
            "lora_id": self._adapters.setdefault(adapter, len(self._adapters) + 1) if adapter else None,
            "medium": "GPU",
            "lora_name": adapter or None,
            "extra_keys": extra if any(extra) else None,
            "group_idx": 0,
        })  # fmt: skip

    def evicted(self, name: int) -> None:
        """A block is gone."""
        self._events.append({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        """All of them are."""
        self._events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def batch(events: list[dict[str, Any]], at: float, schema: str) -> bytes:
    """A message's payload. `at` is epoch seconds, `schema` one of SCHEMAS."""
    if schema == "array":
        encoded: list[Any] = [[event["type"], *(event[field] for field in _ORDER[event["type"]])] for event in events]
    else:
        encoded = list(events)
    return msgspec.msgpack.encode([at, encoded, 0])
