"""Parses KV events in the engines' formats (vLLM, SGLang): msgpack of arrays or of maps, at both layers.

A batch is `[ts, [event...], dp_rank]` or `{ts, events, data_parallel_rank}`; an event is `[tag, field...]` (vLLM up to
0.23, SGLang) or a map with the tag as `type`. New fields are ignored, and older ones may be missing. Invariants: an
unreadable event is counted by reason and the others of its batch are used, but its source's state is no longer
complete; an event of an unknown kind is counted and changes nothing; a change has at most BLOCKS_AT_ONCE blocks, so
that applying it blocks nothing for long. Never fetches, never keeps anything.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from regional_lb.fleet.kv_events import TOKEN_BYTES, Cleared, Lost, Removed, Stored, canonical_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regional_lb.fleet.kv_events import KvEvent

BATCH_BYTES_MAX = 768 * 1024  # a step of 16k tokens takes about 100 KB
EVENTS_MAX = 32_768  # of a batch: as many have 24 bytes each, and one that names a block has more
# Nothing is built of what is small and very many: lists of lists take 0.3 ms for each KiB.
EVENT_BYTES_MAX = 384 * 1024  # 64k tokens
_EXTRAS_BYTES_MAX = 256 * 1024  # 16k tokens of images, of two names a block
_NAMES_MAX, _FIELDS_MAX = 32_768, 64
BLOCKS_AT_ONCE = 1024
BLOCK_TOKENS_MAX = 65_536
_NAME_MAX = 256
_OTHER_LAYERS = ("sliding", "window", "mamba", "chunked", "ssm")  # caches that forget the beginning of a prompt

_Hash = int | bytes
_Names = Annotated[list[_Hash], msgspec.Meta(max_length=_NAMES_MAX)]
_Fields = (
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)]
    | Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)]
)


_NONE = msgspec.Raw(b"\xc0")


class _Event(msgspec.Struct, tag_field="type"):
    pass


class BlockStored(_Event, tag=True):
    """Blocks were stored. Fields have the names and the order of vLLM."""

    block_hashes: _Names
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NONE
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event, tag=True):
    """Blocks were removed. Fields have the names of vLLM."""

    block_hashes: _Names
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(_Event, tag=True):
    """The cache is empty."""


def _as_array(event: type[_Event]) -> type[Any]:
    fields = [
        (f.name, f.type, f.default) if not f.required else (f.name, f.type) for f in msgspec.structs.fields(event)
    ]
    return msgspec.defstruct(event.__name__, fields, array_like=True, tag=event.__name__)


_Word = BlockStored | BlockRemoved | AllBlocksCleared
_fields = msgspec.msgpack.Decoder(_Fields)
_events = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)])
_extra_keys = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_NAMES_MAX)] | None)
_keys = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)] | None)
_NO_KEYS = (b"\xc0", b"\x90")
_text = msgspec.msgpack.Decoder(str)
_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_of_map = msgspec.msgpack.Decoder(_Word)
_of_array = msgspec.msgpack.Decoder(_as_array(BlockStored) | _as_array(BlockRemoved) | _as_array(AllBlocksCleared))


class BatchError(Exception):
    """A batch of which nothing can be read. `reason` is a fixed word to count by."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_batch(payload: bytes, dropped: Callable[[str], None]) -> Iterator[list[KvEvent]]:
    """The changes of each event in a batch, in order, read as they are requested; `dropped` is called for each event
    that could not be used. Raises BatchError at once."""
    if len(payload) > BATCH_BYTES_MAX:
        raise BatchError("size")
    try:
        batch = _fields.decode(payload)
        raw = batch["events"] if isinstance(batch, dict) else batch[1]
        events = _events.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, RecursionError):
        raise BatchError("batch") from None
    return (_read(event, dropped) for event in events)


def _read(event: msgspec.Raw, dropped: Callable[[str], None]) -> list[KvEvent]:
    try:
        return list(_changes(event))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if not _is_known(event):
            dropped("kind")
            return []
        dropped("event")
    except (ValueError, OverflowError, TypeError):
        dropped("value")
    return [Lost(all=False)]


def _is_known(raw: msgspec.Raw) -> bool:
    """Whether a kind that is read here can be made out in an event. What is no event at all might have been one."""
    try:
        event = _fields.decode(raw)
        kind = _text.decode(event["type"] if isinstance(event, dict) else event[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, IndexError):
        return True
    return kind in _KINDS


def _changes(raw: msgspec.Raw) -> Iterator[KvEvent]:
    """One event's changes. Raises msgspec's errors for what is no event, ValueError for what makes no sense."""
    if len(memoryview(raw)) > EVENT_BYTES_MAX:
        raise ValueError("an event that is too large")
    first = memoryview(raw)[0]
    is_array = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
    event: Any = _of_array.decode(raw) if is_array else _of_map.decode(raw)
    kind = type(event).__name__
    if kind == "AllBlocksCleared":
        return iter((Cleared(),))
    if (event.medium or "GPU").upper() != "GPU":
        return iter(())  # on the host or a disk: available, but not at once
    return _removed(event) if kind == "BlockRemoved" else _stored(event)


def _removed(event: BlockRemoved) -> Iterator[KvEvent]:
    names = event.block_hashes
    return iter([
        Removed(names[at : at + BLOCKS_AT_ONCE], event.group_idx) for at in range(0, len(names), BLOCKS_AT_ONCE)
    ])  # fmt: skip


def _stored(event: BlockStored) -> Iterator[KvEvent]:
    names, size = event.block_hashes, event.block_size
    if not 0 < size <= BLOCK_TOKENS_MAX or len(event.token_ids) != len(names) * size:
        raise ValueError("token_ids must be block_size for each of block_hashes")
    if any(layer in (event.kv_cache_spec_kind or "").lower() for layer in _OTHER_LAYERS):
        return iter(())
    adapter = (event.lora_name or ("" if event.lora_id is None else f"#{event.lora_id}"))[:_NAME_MAX]
    ids = array("I", event.token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    tokens, extras = ids.tobytes(), _extras(event, adapter)
    changes: list[KvEvent] = []
    parent = event.parent_block_hash
    for at in range(0, len(names), BLOCKS_AT_ONCE):
        end = at + BLOCKS_AT_ONCE
        part = tokens[at * size * TOKEN_BYTES : end * size * TOKEN_BYTES]
        changes.append(Stored(names[at:end], parent, part, size, adapter, extras[at:end], event.group_idx))
        parent = names[min(end, len(names)) - 1]
    return iter(changes)


def _extras(event: BlockStored, adapter: str) -> tuple[bytes, ...]:
    """The extra keys of each block, without the adapter, which is in the seed."""
    if len(memoryview(event.extra_keys)) > _EXTRAS_BYTES_MAX:
        raise ValueError("extra_keys that are too many")
    given = _extra_keys.decode(event.extra_keys)
    if not given:
        return ()
    if len(given) != len(event.block_hashes):
        raise ValueError("extra_keys must be one for each of block_hashes")
    if adapter:
        own = msgspec.Raw(msgspec.msgpack.encode(adapter))
        extras = tuple(canonical_keys([key for key in _keys.decode(keys) or () if key != own]) for keys in given)
    else:  # as they are: encoding them again would give the same
        extras = tuple(b"" if (keys := bytes(raw)) in _NO_KEYS else b"\xff" + keys for raw in given)
    return extras if any(extras) else ()
