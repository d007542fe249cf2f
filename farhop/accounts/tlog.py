"""Transparency logs as C2SP writes them down: RFC 6962 hashes, tiles, checkpoints as signed notes. Pure.

(c2sp.org/tlog-tiles, tlog-checkpoint, signed-note.) A log's entries are the leaves of a Merkle tree of which each
checkpoint names size and root: an inclusion proof shows that an entry is in it, a consistency proof that one checkpoint
only added to another. A tile holds up to 256 hashes of one level, a bundle up to 256 entries. What has two spellings is
refused in all but one, so that no byte of a log can be another and still hold. Never opens a file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WIDTH = 256
_LEVELS_A_TILE = 8
HASH_BYTES = 32
ENTRY_BYTES_MAX = 65_535
EMPTY_ROOT = hashlib.sha256(b"").digest()
_ED25519 = b"\x01"
_DASH = "\N{EM DASH} "


class LogError(Exception):
    """A log that contradicts itself, its checkpoint or its key. The text says what is wrong, and where."""


def leaf_hash(entry: bytes) -> bytes:
    """The hash of a leaf (RFC 6962, 2.1)."""
    return hashlib.sha256(b"\x00" + entry).digest()


def leaf_hashes(entries: Iterable[bytes]) -> list[bytes]:
    """The same of many: a writer spends most of its time here, and calls nothing that it need not."""
    sha256 = hashlib.sha256
    return [sha256(b"\x00" + one).digest() for one in entries]


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node (RFC 6962, 2.1)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


# -- trees


def tree_hash(read: Callable[[int, int], bytes], low: int, high: int) -> bytes:
    """The hash over leaves [low, high), by its whole subtrees."""
    if low == high:
        return EMPTY_ROOT
    size = high - low
    if size & (size - 1) == 0 and low % size == 0:
        return read(size.bit_length() - 1, low // size)
    middle = low + _split(size)
    return node_hash(tree_hash(read, low, middle), tree_hash(read, middle, high))


def _split(size: int) -> int:
    """The largest power of two below `size`."""
    return 1 << ((size - 1).bit_length() - 1)


def inclusion_proof(read: Callable[[int, int], bytes], index: int, size: int) -> list[bytes]:
    """PATH(index, D[size]) of RFC 6962, 2.1.1. LogError if there is no such leaf."""
    if not 0 <= index < size:
        raise LogError(f"entry {index} is not among {size}")
    return _path(read, index, 0, size)


def _path(read: Callable[[int, int], bytes], index: int, low: int, high: int) -> list[bytes]:
    if high - low == 1:
        return []
    middle = low + _split(high - low)
    if index < middle:
        return [*_path(read, index, low, middle), tree_hash(read, middle, high)]
    return [*_path(read, index, middle, high), tree_hash(read, low, middle)]


def root_of(leaf: bytes, index: int, size: int, proof: Sequence[bytes]) -> bytes:
    """The root that an inclusion proof leads to (RFC 9162, 2.1.3.2). LogError if its length is not that of one."""
    if not 0 <= index < size:
        raise LogError(f"entry {index} is not among {size}")
    node, last, found = index, size - 1, leaf
    for one in proof:
        if last == 0:
            raise LogError("the inclusion proof is too long")
        if node & 1 or node == last:
            found = node_hash(one, found)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            found = node_hash(found, one)
        node, last = node >> 1, last >> 1
    if last:
        raise LogError("the inclusion proof is too short")
    return found


def consistency_proof(read: Callable[[int, int], bytes], old: int, new: int) -> list[bytes]:
    """PROOF(old, D[new]) of RFC 6962, 2.1.2. LogError if `old` is not within."""
    if not 0 < old <= new:
        raise LogError(f"no log of {old} entries grew to {new}")
    return _subproof(read, old, 0, new, whole=True)


def _subproof(read: Callable[[int, int], bytes], old: int, low: int, high: int, *, whole: bool) -> list[bytes]:
    if old == high:
        return [] if whole else [tree_hash(read, low, high)]
    middle = low + _split(high - low)
    if old <= middle:
        return [*_subproof(read, old, low, middle, whole=whole), tree_hash(read, middle, high)]
    return [*_subproof(read, old, middle, high, whole=False), tree_hash(read, low, middle)]


def check_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Whether the later tree begins with the earlier one (RFC 9162, 2.1.4.2). LogError if not."""
    if not 0 < old <= new:
        raise LogError(f"no log of {old} entries grew to {new}")
    if old == new:
        if proof or old_root != new_root:
            raise LogError(f"two logs of {old} entries differ")
        return
    path = list(proof)
    if old & (old - 1) == 0:
        path.insert(0, old_root)
    if not path:
        raise LogError("the consistency proof is empty")
    node, last = old - 1, new - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    first = second = path[0]
    for one in path[1:]:
        if last == 0:
            raise LogError("the consistency proof is too long")
        if node & 1 or node == last:
            first, second = node_hash(one, first), node_hash(one, second)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            second = node_hash(second, one)
        node, last = node >> 1, last >> 1
    if first != old_root or second != new_root or last:
        raise LogError(f"what was signed at {old} entries is not the beginning of what was signed at {new}")


class Tree:
    """The right edge of a growing tree: of each tile level the hashes of its unfinished tile."""

    __slots__ = ("levels", "size")

    def __init__(self) -> None:
        self.size, self.levels = 0, [list[bytes]()]

    def extend(self, leaves: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
        """More leaves; yields the tiles that are full with them: level, index, hashes."""
        at = 0
        while at < len(leaves):
            level, row = 0, self.levels[0]
            added = leaves[at : at + WIDTH - len(row)]
            row += added
            self.size, at = self.size + len(added), at + len(added)
            while len(row) == WIDTH:
                yield level, (self.size >> (_LEVELS_A_TILE * (level + 1))) - 1, b"".join(row)
                self.levels[level] = []
                level += 1
                if level == len(self.levels):
                    self.levels.append([])
                self.levels[level].append(fold(row))
                row = self.levels[level]

    def partial(self) -> Iterator[tuple[int, int, bytes]]:
        """The unfinished tiles: level, index, hashes."""
        for level, row in enumerate(self.levels):
            if row:
                yield level, self.size >> (_LEVELS_A_TILE * (level + 1)), b"".join(row)

    def root(self) -> bytes:
        """The root hash over all leaves so far."""
        whole = [part for row in reversed(self.levels) for part in _powers(row)]
        if not whole:
            return EMPTY_ROOT
        found = whole.pop()
        while whole:
            found = node_hash(whole.pop(), found)
        return found


def fold(row: Sequence[bytes]) -> bytes:
    """The root hash of a complete subtree, from its row of hashes; their number is a power of two."""
    sha256 = hashlib.sha256
    while len(row) > 1:
        row = [sha256(b"\x01" + left + right).digest() for left, right in zip(row[::2], row[1::2], strict=True)]
    return row[0]


def _powers(row: Sequence[bytes]) -> Iterator[bytes]:
    """The hashes of the whole subtrees that a row is made of, the largest first."""
    start = 0
    for bit in reversed(range(len(row).bit_length())):
        if len(row) >> bit & 1:
            yield fold(row[start : start + (1 << bit)])
            start += 1 << bit


# -- tiles

TileAt = tuple[int, int, int]  # level, index, width


def tiles_of(size: int) -> Iterator[TileAt]:
    """All tiles of a log of `size` entries; the last one of each level may be partial."""
    level = 0
    while (hashes := size >> (_LEVELS_A_TILE * level)) > 0:
        for index in range(hashes // WIDTH):
            yield level, index, WIDTH
        if hashes % WIDTH:
            yield level, hashes // WIDTH, hashes % WIDTH
        level += 1


def hash_reader(tile: Callable[[TileAt], bytes], size: int) -> Callable[[int, int], bytes]:
    """A function that gives the hash of any complete subtree of a log of `size` entries, read from its tiles."""

    def read(level: int, index: int) -> bytes:
        row, above = level // _LEVELS_A_TILE, level % _LEVELS_A_TILE
        first = index << above  # of the tile level's hashes, those under it
        number = first // WIDTH
        there = min(WIDTH, (size >> (_LEVELS_A_TILE * row)) - number * WIDTH)
        data = tile((row, number, there))
        at = first % WIDTH
        return fold([data[HASH_BYTES * i : HASH_BYTES * (i + 1)] for i in range(at, at + (1 << above))])

    return read


def tile_path(level: int, index: int, width: int) -> str:
    """The path of a tile: tile/<L>/<N>[.p/<W>]."""
    return f"tile/{level}/{_numbered(index, width)}"


def bundle_path(index: int, width: int) -> str:
    """The path of a bundle of entries: tile/entries/<N>[.p/<W>]."""
    return f"tile/entries/{_numbered(index, width)}"


def _numbered(index: int, width: int) -> str:
    parts = [f"{index % 1000:03d}"]
    while index >= 1000:
        index //= 1000
        parts.append(f"x{index % 1000:03d}")
    path = "/".join(reversed(parts))
    return path if width == WIDTH else f"{path}.p/{width}"


def bundle(entries: Iterable[bytes]) -> bytes:
    """The content of a bundle: each entry after its length (2 bytes)."""
    return b"".join([part for one in entries for part in (len(one).to_bytes(2, "big"), one)])


def unbundle(data: bytes, source: str = "a bundle") -> list[bytes]:
    """The entries of a bundle. LogError if it is cut."""
    found, at = list[bytes](), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        if at + 2 + size > len(data):
            raise LogError(f"{source}: is cut short")
        found.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return found


# -- checkpoints


class Checkpoint(NamedTuple):
    """What is signed: the log's name, its number of entries and its root hash."""

    origin: str
    size: int
    root: bytes

    @property
    def body(self) -> bytes:
        """The text that is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n".encode()


def key_id(name: str, public: Ed25519PublicKey) -> bytes:
    """SHA-256(name, newline, 0x01, key), its first four bytes."""
    return hashlib.sha256(name.encode() + b"\n" + _ED25519 + public.public_bytes_raw()).digest()[:4]


def verifier_key(name: str, public: Ed25519PublicKey) -> str:
    """A public key in the notation of signed-note: NAME+ID+KEY."""
    key = base64.b64encode(_ED25519 + public.public_bytes_raw()).decode()
    return f"{name}+{key_id(name, public).hex()}+{key}"


def read_verifier_key(text: str) -> tuple[str, Ed25519PublicKey]:
    """The name and the key in that notation. Raises LogError for any other text."""
    name, _, rest = text.strip().partition("+")
    try:
        data = base64.b64decode(rest.partition("+")[2], validate=True)
        public = Ed25519PublicKey.from_public_bytes(data[1:])
    except (binascii.Error, ValueError):
        raise LogError("not a verifier key: give NAME+ID+KEY, as `vkey` in the log's folder says it") from None
    if verifier_key(name, public) != text.strip():
        raise LogError("not a verifier key: its name, id and bytes do not match")
    return name, public


def sign(checkpoint: Checkpoint, key: Ed25519PrivateKey) -> bytes:
    """The checkpoint as a signed note."""
    body = checkpoint.body
    signature = base64.b64encode(key_id(checkpoint.origin, key.public_key()) + key.sign(body)).decode()
    return body + f"\n{_DASH}{checkpoint.origin} {signature}\n".encode()


def open_checkpoint(note: bytes, origin: str, public: Ed25519PublicKey) -> Checkpoint:
    """The checkpoint in a signed note. Raises LogError unless it is of this log and signed by this key."""
    try:
        lines = note.decode().split("\n")
        size, root = int(lines[1]), base64.b64decode(lines[2], validate=True)
        checkpoint = Checkpoint(lines[0], size, root)
        if checkpoint.origin != origin:
            raise LogError(f"the checkpoint is another log's: not {origin}'s")
        signature = base64.b64decode(lines[4].removeprefix(f"{_DASH}{origin} "), validate=True)
    except (UnicodeDecodeError, ValueError, IndexError, binascii.Error):
        raise LogError("this is not a checkpoint") from None
    tail = f"\n{_DASH}{origin} {base64.b64encode(signature).decode()}\n".encode()
    if note != checkpoint.body + tail or len(root) != HASH_BYTES or signature[:4] != key_id(origin, public):
        raise LogError("the checkpoint is not as this key signs one")
    try:
        public.verify(signature[4:], checkpoint.body)
    except InvalidSignature:
        raise LogError("the checkpoint's signature is not valid") from None
    return checkpoint
