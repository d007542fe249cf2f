"""Every wording of KV events, and that what cannot be read never takes with it what can."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from engine_pages import kv_events
from hypothesis import given, settings
from hypothesis import strategies as st

from regional_lb.engines.kv.wire import BATCH_BYTES_MAX, BLOCKS_AT_ONCE, EVENTS_MAX, BatchError, read_batch
from regional_lb.fleet.kv_events import Cleared, Lost, Removed, Stored, canonical_keys

pack = msgspec.msgpack.encode
STORED: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
    "block_size": 2,
}  # fmt: skip
AS_READ = Stored([7, 8], None, struct.pack("<4I", 1, 2, 3, 4), 2)


def read(*events: Any, **batch: Any) -> tuple[list[Any], list[str]]:
    dropped: list[str] = []
    payload = pack(batch or [1.5, list(events), 0])
    return read_all(payload, dropped.append), dropped


def read_all(payload: bytes, dropped: Callable[[str], None] = pytest.fail) -> list[Any]:
    return [change for of_event in read_batch(payload, dropped) for change in of_event]


def test_maps_and_arrays_say_the_same_at_both_layers() -> None:
    as_array = ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2]
    assert read(STORED) == read(as_array) == ([AS_READ], [])
    assert read([*as_array, None, "GPU", None, None, None, "full_attention", None, "a field of tomorrow"])[0] == [
        AS_READ
    ]
    assert read({**STORED, "medium": "gpu", "a field": "of tomorrow"})[0] == [AS_READ]
    assert read(ts=1.0, events=[STORED, ["AllBlocksCleared"]], data_parallel_rank=3)[0] == [AS_READ, Cleared()]
    assert read_all(pack([1.0, [STORED]])) == [AS_READ]  # no rank
    assert read(["BlockRemoved", [1, b"\xff"]])[0] == [Removed([1, b"\xff"])]
    assert read({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 2})[0] == [Removed([1], 2)]
    assert read(["AllBlocksCleared", "more"], {"type": "AllBlocksCleared"})[0] == [Cleared(), Cleared()]


def test_hashes_are_numbers_or_bytes() -> None:
    names = [-(2**63), 2**64 - 1]
    assert read({**STORED, "block_hashes": names})[0][0].hashes == names
    (change,) = read({**STORED, "block_hashes": [b"a" * 32, b"b"], "parent_block_hash": b"c"})[0]
    assert (change.hashes, change.parent) == ([b"a" * 32, b"b"], b"c")


def test_adapters_and_extra_keys_keep_blocks_apart() -> None:
    assert read({**STORED, "lora_name": "sql", "lora_id": 1})[0][0].adapter == "sql"
    assert read({**STORED, "lora_id": 1})[0][0].adapter == "#1"  # an older engine: without a name
    (change,) = read({**STORED, "lora_name": "sql", "extra_keys": [["sql", "pepper"], ["sql"]]})[0]
    assert change.extras == (canonical_keys(["pepper"]), b"")
    assert read({**STORED, "extra_keys": [None, []]})[0] == [AS_READ]
    picture = read({**STORED, "extra_keys": [None, [["a-picture", 3]]]})[0][0]
    assert picture.extras[1] not in (b"", canonical_keys([["another", 3]]))


@pytest.mark.parametrize("adapter", [None, "sql"])
def test_a_step_of_pictures_has_a_name_and_a_place_of_each_by_block(adapter: str | None) -> None:
    """A step of 16k tokens: to keep lists of lists few, it was refused whole."""
    blocks = 1024
    pictures = [[f"{block:064x}", -3] for block in range(blocks)]
    event = {
        **STORED, "block_hashes": list(range(blocks)), "token_ids": [150_000] * blocks * 16, "block_size": 16,
        "lora_name": adapter, "extra_keys": [[picture, *([adapter] if adapter else [])] for picture in pictures],
    }  # fmt: skip
    (change,), dropped = read(event)
    assert dropped == []
    assert change.extras == tuple(canonical_keys([picture]) for picture in pictures)


def test_other_media_and_other_layers_are_passed_over() -> None:
    assert read({**STORED, "medium": "CPU"}, ["BlockRemoved", [1], "DISK"]) == ([], [])
    assert read({**STORED, "kv_cache_spec_kind": "sliding_window"}) == ([], [])


def test_a_large_event_comes_in_parts() -> None:
    n = 2 * BLOCKS_AT_ONCE + 5
    changes, _ = read({**STORED, "block_hashes": list(range(n)), "token_ids": list(range(2 * n))})
    assert [len(change.hashes) for change in changes] == [BLOCKS_AT_ONCE, BLOCKS_AT_ONCE, 5]
    assert [change.parent for change in changes] == [None, BLOCKS_AT_ONCE - 1, 2 * BLOCKS_AT_ONCE - 1]
    assert b"".join(change.tokens for change in changes) == struct.pack(f"<{2 * n}I", *range(2 * n))
    removed, _ = read(["BlockRemoved", list(range(n))])
    assert [len(change.hashes) for change in removed] == [BLOCKS_AT_ONCE, BLOCKS_AT_ONCE, 5]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({**STORED, "block_size": 0}, "value"),
        ({**STORED, "block_size": 3}, "value"),
        ({**STORED, "token_ids": [1, 2, 3, -1]}, "value"),
        ({**STORED, "token_ids": [1, 2, 3, 2**32]}, "value"),
        ({**STORED, "extra_keys": [None]}, "value"),
        ({**STORED, "token_ids": "abcd"}, "event"),
        ({"type": "BlockStored"}, "event"),
        (["BlockRemoved"], "event"),
        (["BlockRemoved", [1.5]], "event"),
        (7, "event"),
        ([], "event"),
        ({}, "event"),
        ({1: 2}, "event"),
        (None, "event"),
    ],
)
def test_one_unreadable_event_is_counted_and_the_others_stand(event, reason) -> None:
    changes, dropped = read(STORED, event, ["AllBlocksCleared"])
    assert changes == [AS_READ, Lost(all=False), Cleared()]
    assert dropped == [reason]


def test_an_unknown_kind_of_event_is_counted_and_ignored() -> None:
    assert read({"type": "BlockMoved"}, STORED, ["BlockCopied", 1]) == ([AS_READ], ["kind", "kind"])


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", pack(5), pack([1.0]), pack({"ts": 1}), pack([1.0, 7]), pack("x")]
)
def test_a_broken_batch_is_refused_whole(payload) -> None:
    with pytest.raises(BatchError, match="batch"):
        read_batch(payload, pytest.fail)
    with pytest.raises(BatchError, match="size"):
        read_batch(bytes(BATCH_BYTES_MAX + 1), pytest.fail)


def test_more_events_than_any_engine_has_are_no_batch() -> None:
    events = b"\xc0" * EVENTS_MAX
    assert len(list(read_batch(b"\x92\x01\xdd" + EVENTS_MAX.to_bytes(4, "big") + events, _no))) == EVENTS_MAX
    with pytest.raises(BatchError, match="batch"):
        read_batch(b"\x92\x01\xdd" + (EVENTS_MAX + 1).to_bytes(4, "big") + events + b"\xc0", pytest.fail)


def _many(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def _event(*fields: bytes) -> bytes:
    return b"\x92\x01\x91" + bytes((0x90 + len(fields),)) + b"".join(fields)


_STORED = (pack("BlockStored"), b"\x91\x07", b"\xc0", b"\x91\x01", b"\x01", b"\xc0", b"\xc0", b"\xc0")


@pytest.mark.parametrize(
    ("payload", "reasons"),
    [
        (_many(700_000, b"\x01"), None),
        (b"\xdf" + (60_000).to_bytes(4, "big") + b"".join(b"\xa5%05d\x01" % n for n in range(60_000)), None),
        (_event(*_STORED, _many(700_000, b"\x90")), ["value"]),
        (_event(*_STORED, _many(90_000, b"\x90")), ["event"]),
        (_event(pack("BlockRemoved"), _many(300_000, b"\x01")), ["event"]),
        (_event(pack("BlockMoved"), _many(300_000, b"\x90")), ["kind"]),
    ],
)
def test_very_many_tiny_items_in_a_batch_are_refused_before_they_are_built(
    payload: bytes, reasons: list[str] | None
) -> None:
    """One message of 760 KiB held the loop for up to 230 ms."""
    dropped = list[str]()
    tracemalloc.start()
    try:
        if reasons is None:
            with pytest.raises(BatchError, match="batch"):
                read_all(payload, dropped.append)
        else:
            read_all(payload, dropped.append)
            assert dropped == reasons
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(payload), "lists, maps and numbers take 8 to 64 bytes each"


@pytest.mark.parametrize(("blocks", "dropped"), [(4096, []), (8192, ["value"])])
def test_an_event_is_as_long_as_64k_tokens_make_it(blocks: int, dropped: list[str]) -> None:
    """To read twice as many takes 10 ms."""
    names, ids = [2**62 + block for block in range(blocks)], [150_000] * blocks * 16
    assert read({**STORED, "block_hashes": names, "token_ids": ids, "block_size": 16})[1] == dropped


def test_nesting_without_end_is_refused() -> None:
    deep = b"\x91" * 500_000 + b"\x90"
    with pytest.raises(BatchError, match="batch"):
        read_batch(b"\x92\x01\x92" + deep + pack(STORED), pytest.fail)


def _no(_reason: str) -> None:
    return


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_arbitrary_bytes_are_decoded_or_refused(noise, at, byte) -> None:
    whole = bytearray(pack([1.0, [STORED, ["BlockRemoved", [1]], {"type": "AllBlocksCleared"}], 0]))
    whole[at % len(whole)] = byte
    for payload in (noise, bytes(whole), bytes(whole[:at]), bytes(whole) + noise):
        try:
            changes = read_all(payload, _no)
        except BatchError:
            continue
        assert all(isinstance(change, Stored | Removed | Cleared | Lost) for change in changes)


# -- as vLLM says it (tests/pages)


def changes(step: str) -> list[Any]:
    return [change for frames in kv_events()[step] if frames[-1] for change in read_all(frames[-1])]


def test_blocks_stored_by_vllm_are_read_to_the_token() -> None:
    (first,) = changes("stored")
    assert (len(first.hashes), first.parent, first.block_tokens, first.adapter) == (2, None, 128, "")
    assert first.tokens == struct.pack("<256I", *[11] * 200, *[20] * 56)
    (second,) = changes("stored behind what is held")
    assert second.parent == first.hashes[0]
    assert second.tokens == struct.pack("<128I", *[11] * 72, *[21] * 56)
    (adapted,) = changes("stored by an adapter")
    assert (adapted.adapter, adapted.extras, adapted.parent) == ("adapted", (), None)
    (salted,) = changes("stored with a salt")
    assert salted.extras == (canonical_keys(["pepper"]), b"")
    assert len({first.hashes[0], adapted.hashes[0], salted.hashes[0]}) == 3


def test_vllm_removes_only_blocks_that_it_stored() -> None:
    held: set[Any] = set()
    for step in kv_events():
        if step.startswith("said again"):
            continue
        for change in changes(step):
            if isinstance(change, Stored):
                assert change.parent is None or change.parent in held
                held.update(change.hashes)
            elif isinstance(change, Removed):
                assert held.issuperset(change.hashes)
                held.difference_update(change.hashes)
            else:
                assert change == Cleared()
                held.clear()
        assert len(held) < 40  # all the blocks that there are
    assert len(held) == 1


def test_a_replay_of_vllm_repeats_the_same_events() -> None:
    again = kv_events()["said again from 2"]
    found = [
        frames for step, messages in kv_events().items() if not step.startswith("said again") for frames in messages
    ]
    assert [frames[-2:] for frames in again[:-1]] == [frames[-2:] for frames in found[2:]]
    assert again[-1][-2:] == [(-1).to_bytes(8, "big", signed=True), b""]
