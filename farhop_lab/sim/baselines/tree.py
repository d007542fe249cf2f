"""Which texts were sent to whom: one radix tree of bytes with owners, as in SGLang's router and SkyWalker.

It remembers what was sent, not what an engine still holds. Invariants: an owner of a node owns its parent, too; `size`
is the sum of an owner's labels; above `chars_max` an owner's leaves are evicted, oldest first, every EVICT_S. Reading
(`match`, `depths`) never writes.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

CHARS_MAX = 2**24
EVICT_S = 60.0


class _Node:
    __slots__ = ("children", "label", "owners", "parent")

    def __init__(self, label: bytes, parent: _Node | None, owners: dict[str, float]) -> None:
        self.label, self.parent, self.owners = label, parent, owners
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """See the module's head. Characters are bytes."""

    def __init__(self, chars_max: int = CHARS_MAX) -> None:
        self._chars_max = chars_max
        self._root = _Node(b"", None, {})
        self._sizes: Counter[str] = Counter()
        self._evict_at: float | None = None

    def size(self, owner: str) -> int:
        """Characters kept for an owner."""
        return self._sizes[owner]

    def depths(self, text: bytes, among: Collection[str]) -> dict[str, int]:
        """How many leading characters of `text` were sent to each of them before."""
        found = dict.fromkeys(among, 0)
        live = set(among)
        node, at = self._root, 0
        while live and at < len(text) and (child := node.children.get(text[at])) is not None:
            live &= child.owners.keys()
            same = common(text, at, child.label)
            at += same
            for owner in live:
                found[owner] = at
            if same < len(child.label):
                break
            node = child
        return found

    def match(self, text: bytes, among: Collection[str]) -> tuple[int, list[str]]:
        """The longest prefix that was sent to any of them, and its owners, in the order of `among`."""
        found = self.depths(text, among)
        longest = max(found.values(), default=0)
        return longest, [owner for owner in among if found[owner] == longest] if longest else []

    def insert(self, text: bytes, owner: str, now: float) -> None:
        """The text was sent to the owner."""
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = _Node(text[at:], node, {})
                node.children[text[at]] = child
            else:
                same = common(text, at, child.label)
                if same < len(child.label):
                    child = self._split(child, same)
            if owner not in child.owners:
                self._sizes[owner] += len(child.label)
            child.owners[owner] = now
            at += len(child.label)
            node = child
        if self._evict_at is None:
            self._evict_at = now + EVICT_S
        elif now >= self._evict_at:
            self._evict_at = now + EVICT_S
            for name in [name for name, size in self._sizes.items() if size > self._chars_max]:
                self._evict(name)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two at `at` characters; the upper one is returned."""
        parent = node.parent
        assert parent is not None, "the root has no label to split"
        upper = _Node(node.label[:at], parent, dict(node.owners))
        parent.children[upper.label[0]] = upper
        node.label, node.parent = node.label[at:], upper
        upper.children[node.label[0]] = node
        return upper

    def _evict(self, owner: str) -> None:
        leaves: list[tuple[float, int, _Node]] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            below = [child for child in node.children.values() if owner in child.owners]
            stack += below
            if not below and node.parent is not None:
                leaves.append((node.owners[owner], len(leaves), node))
        heapify(leaves)
        serial = len(leaves)
        while leaves and self._sizes[owner] > self._chars_max:
            _, _, node = heappop(leaves)
            parent = node.parent
            assert parent is not None, "the root is nobody's leaf"
            del node.owners[owner]
            self._sizes[owner] -= len(node.label)
            if not node.owners:
                del parent.children[node.label[0]]
            if parent.parent is not None and not any(owner in child.owners for child in parent.children.values()):
                serial += 1
                heappush(leaves, (parent.owners[owner], serial, parent))


def common(text: bytes, at: int, label: bytes) -> int:
    """How many characters of `label` are in `text` at `at`."""
    if text.startswith(label, at):
        return len(label)
    low, high = 0, min(len(label), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(label[:middle], at):
            low = middle
        else:
            high = middle - 1
    return low
