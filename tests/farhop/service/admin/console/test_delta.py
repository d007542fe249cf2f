"""Deltas and the ring: a patch leads from one picture to the next, whatever they are; bounds hold."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.service.admin.console.delta import AT_ONCE, CHUNK, STEP_BYTES, Picture, Ring, apply, diff, diff_in_turns
from farhop.service.admin.console.snapshot import whole

LEAVES = st.one_of(st.integers(-3, 3), st.text(max_size=2), st.booleans(), st.lists(st.integers(0, 2), max_size=2))
PICTURES = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), LEAVES, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), st.one_of(LEAVES, inner), max_size=4),
    max_leaves=12,
)


@settings(max_examples=150)
@given(PICTURES, PICTURES)
def test_a_patch_leads_from_any_picture_to_any_other(old: Picture, new: Picture) -> None:
    patch = diff(old, new)
    assert apply(old, patch) == new
    assert diff(new, new) == {}
    assert whole(diff_in_turns(old, new)) == patch
    assert list(patch) == list(whole(diff_in_turns(old, new)))


def test_many_rows_are_compared_a_few_at_a_time() -> None:
    rows: Picture = {f"r{n}": {"n": n} for n in range(3 * AT_ONCE)}
    assert len(list(diff_in_turns({"replicas": {}}, {"replicas": rows}))) == 3


@settings(max_examples=40)
@given(st.lists(PICTURES, min_size=1, max_size=8), st.integers(0, 7))
def test_a_resumed_viewer_ends_with_the_same_snapshot_as_one_that_stayed(pictures: list[Picture], left_at: int) -> None:
    ring, before = Ring(), Picture()
    seen: list[Picture] = []
    for number, picture in enumerate(pictures, 1):
        ring.add(number, number * 1000, picture, msgspec.json.encode(diff(before, picture)))
        before = picture
        seen.append(picture)
    left_at = min(left_at, len(pictures))
    patches = ring.since(left_at)
    assert patches is not None
    resumed = seen[left_at - 1] if left_at else {}
    for _, patch in patches:
        resumed = apply(resumed, msgspec.json.decode(patch))
    assert resumed == pictures[-1]
    assert ring.since(len(pictures) + 1) is None


def _fill(ring: Ring, pictures: int) -> None:
    before = Picture()
    for number in range(1, pictures + 1):
        picture = {"n": number, "of": {str(number % 7): number * 7919 % 1013}}
        ring.add(number, number * 1000, picture, msgspec.json.encode(diff(before, picture)))
        before = picture


def test_every_moment_kept_can_be_looked_at() -> None:
    ring = Ring(seconds=3 * CHUNK)
    _fill(ring, 5 * CHUNK + 3)
    chunks = ring.chunks()
    assert len(chunks) == 4  # three past ones, and the open one
    seen = []
    found = [msgspec.json.decode(ring.chunk(chunk["number"]) or b"") for chunk in chunks]
    for chunk, one in zip(chunks, found, strict=True):
        picture = one["picture"]
        seen.append(picture["n"])
        for patch in one["patches"]:
            picture = apply(picture, patch)
            seen.append(picture["n"])
        assert picture["n"] * 1000 == chunk["to_ms"]
    assert seen == list(range(2 * CHUNK + 1, 5 * CHUNK + 4))
    assert ring.chunk(1) is None
    since = [msgspec.json.decode(ring.past(one["from_ms"])) for one in chunks]
    assert since == [{"chunks": found[i:]} for i in range(4)]
    assert Ring().past(0) == b'{"chunks":[]}'


def test_a_chunk_is_compressed_while_it_grows_and_not_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the bytes that one picture has compressed: the loop is held for that long."""
    real, at_once, compressed = zlib.compressobj, zlib.compress, 0

    class Counting:
        def __init__(self, level: int) -> None:
            self._real = real(level)

        def compress(self, data: bytes) -> bytes:
            nonlocal compressed
            compressed += len(data)
            return self._real.compress(data)

        def flush(self) -> bytes:
            return self._real.flush()

    def counting(data: bytes, level: int) -> bytes:
        nonlocal compressed
        compressed += len(data)
        return at_once(data, level)

    monkeypatch.setattr(zlib, "compressobj", Counting)
    monkeypatch.setattr(zlib, "compress", counting)
    large: Picture = {"of": {str(n): f"{n * 7919:010}" for n in range(20_000)}}
    whole, most, ring, before = len(msgspec.json.encode(large)), 0, Ring(), Picture()
    for number in range(1, 2 * CHUNK + 2):
        picture: Picture = {"of": large["of"], "n": {str(k): number for k in range(100)}}
        compressed = 0
        ring.add(number, number * 1000, picture, msgspec.json.encode(diff(before, picture)))
        most, before = max(most, compressed), picture
    assert whole > 20 * STEP_BYTES
    assert most <= 2 * STEP_BYTES
    chunk = msgspec.json.decode(ring.chunk(CHUNK + 1) or b"")
    assert chunk["picture"]["n"]["0"] == CHUNK + 1
    assert [patch["n"]["99"] for patch in chunk["patches"]] == [*range(CHUNK + 2, 2 * CHUNK + 1)]


def test_the_ring_is_bounded_in_bytes_too() -> None:
    ring = Ring(bytes_max=1500)
    _fill(ring, 12 * CHUNK)
    assert 0 < ring.held_bytes <= 1500
