"""Trees, tiles and notes against another implementation (pymerkle), and every proof against every lie."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pymerkle import InmemoryTree, verify_consistency, verify_inclusion

from farhop.accounts import tlog
from farhop.accounts.tlog import WIDTH, Checkpoint, LogError, Tree

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def entries(count: int) -> list[bytes]:
    return [b"entry %d" % n for n in range(count)]


class Stored:
    """A log's tiles in memory, as `Tree` gives them."""

    def __init__(self, count: int) -> None:
        self.tree, self.tiles = Tree(), dict[tlog.TileAt, bytes]()
        for entry in entries(count):
            for level, index, hashes in self.tree.extend([tlog.leaf_hash(entry)]):
                self.tiles[level, index, WIDTH] = hashes
        for level, index, hashes in self.tree.partial():
            self.tiles[level, index, len(hashes) // 32] = hashes
        assert sorted(self.tiles) == sorted(tlog.tiles_of(count))
        self.read = tlog.hash_reader(self.tiles.__getitem__, count)


def other(count: int) -> Any:
    tree = InmemoryTree(algorithm="sha256")
    for entry in entries(count):
        tree.append_entry(entry)
    return tree


BIG = Stored(1300)
OTHER = other(1300)


@given(st.integers(1, 1300), st.data())
@settings(max_examples=40)
def test_roots_and_proofs_are_those_of_another_implementation(size: int, data: Any) -> None:
    root = tlog.tree_hash(BIG.read, 0, size)
    assert root == OTHER.get_root(size)
    index = data.draw(st.integers(0, size - 1))
    leaf, path = tlog.leaf_hash(b"entry %d" % index), tlog.inclusion_proof(BIG.read, index, size)
    theirs = OTHER.prove_inclusion(index + 1, size)
    verify_inclusion(leaf, root, theirs)
    assert theirs.path == [leaf, *path] or size == 1
    assert tlog.root_of(leaf, index, size, path) == root
    new = data.draw(st.integers(size, 1300))
    proof, later = tlog.consistency_proof(BIG.read, size, new), tlog.tree_hash(BIG.read, 0, new)
    tlog.check_consistency(size, root, new, later, proof)
    verify_consistency(root, later, OTHER.prove_consistency(size, new))


@given(st.integers(2, 600), st.randoms())
@settings(max_examples=40)
def test_altered_inclusion_and_consistency_proofs_do_not_verify(size: int, rng: Random) -> None:
    root = tlog.tree_hash(BIG.read, 0, size)
    index, old = rng.randrange(size), rng.randrange(1, size)
    leaf, path = tlog.leaf_hash(b"entry %d" % index), tlog.inclusion_proof(BIG.read, index, size)
    for wrong in ([*path, bytes(32)], path[:-1], [bytes(32), *path[1:]]):
        try:
            assert tlog.root_of(leaf, index, size, wrong) != root
        except LogError:
            continue
    proof, before = tlog.consistency_proof(BIG.read, old, size), tlog.tree_hash(BIG.read, 0, old)
    for first, last, given_ in ((bytes(32), root, proof), (before, bytes(32), proof), (before, root, proof[:-1])):
        with pytest.raises(LogError):
            tlog.check_consistency(old, first, size, last, given_)


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 512, 1300])
def test_the_root_computed_from_the_stored_right_edge_is_right(size: int) -> None:
    stored = Stored(size)
    assert stored.tree.root() == (OTHER.get_root(size) if size else tlog.EMPTY_ROOT)


def test_paths_are_those_of_the_specification() -> None:
    """c2sp.org/tlog-tiles: tile/0/x001/x234/067, tile/L/N.p/W, tile/entries/N."""
    assert tlog.tile_path(0, 1_234_067, WIDTH) == "tile/0/x001/x234/067"
    assert tlog.tile_path(1, 5, 12) == "tile/1/005.p/12"
    assert tlog.bundle_path(1000, WIDTH) == "tile/entries/x001/000"
    assert list(tlog.tiles_of(256 * 256 + 257)) == [
        *((0, n, 256) for n in range(257)), (0, 257, 1), (1, 0, 256), (1, 1, 1), (2, 0, 1),
    ]  # fmt: skip
    assert tlog.unbundle(tlog.bundle([b"", b"abc"])) == [b"", b"abc"]


def test_a_checkpoint_has_one_spelling() -> None:
    """Every byte of it: changed, doubled or left out, it no longer holds."""
    made = Checkpoint("example.com/log", 12, bytes(32))
    note, public = tlog.sign(made, KEY), KEY.public_key()
    assert tlog.open_checkpoint(note, "example.com/log", public) == made
    for at in range(len(note)):
        for wrong in (bytes([note[at] ^ 1]), bytes([note[at] ^ 0x20]), b"", note[at : at + 1] * 2):
            with pytest.raises(LogError):
                tlog.open_checkpoint(note[:at] + wrong + note[at + 1 :], "example.com/log", public)
    with pytest.raises(LogError, match="another log"):
        tlog.open_checkpoint(tlog.sign(made._replace(origin="b"), KEY), "example.com/log", public)


def test_keys_are_written_as_signed_note_does() -> None:
    text = tlog.verifier_key("example.com/log", KEY.public_key())
    assert tlog.read_verifier_key(text + "\n")[0] == "example.com/log"
    for wrong in ("", "a+b+c", text[:-4], text.replace("example", "exemple")):
        with pytest.raises(LogError, match="not a verifier key"):
            tlog.read_verifier_key(wrong)
