"""The changes of a KV cache that an engine can report, whatever its encoding. Never judges, never keeps anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

Hash: TypeAlias = int | bytes

TOKEN_BYTES = 4  # an id as little-endian u32


class Stored(msgspec.Struct, frozen=True):
    """Blocks that follow one another below `parent` (None: they begin a prompt) are held.

    `tokens` are the ids of all of them, TOKEN_BYTES each; `extras` has for each block what `canonical_keys` makes of
    its keys, b"" for none, or is () where no block has any. `group`: the KV cache group, None where there is but one.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: bytes
    block_tokens: int
    adapter: str = ""
    extras: tuple[bytes, ...] = ()
    group: int | None = None


class Removed(msgspec.Struct, frozen=True):
    """A copy of each of these blocks was removed."""

    hashes: Sequence[Hash]
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True):
    """The engine's cache is empty: the engine said so, or it is a new process."""


class Lost(msgspec.Struct, frozen=True):
    """Some events are lost: what was and will be reported is incomplete. `all`: what was reported is not valid any
    more, either."""

    all: bool = True


class Linked(msgspec.Struct, frozen=True):
    """The link to the replica's KV events is up, or down."""

    up: bool


KvEvent: TypeAlias = Stored | Removed | Cleared | Lost | Linked


def canonical_keys(keys: Sequence[Any]) -> bytes:
    """What sets a block apart beside its tokens, as bytes that go into its node; b"" for nothing."""
    return b"\xff" + msgspec.msgpack.encode(keys) if keys else b""
