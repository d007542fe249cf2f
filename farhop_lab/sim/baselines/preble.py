"""Preble's E2 (ICLR'25; WukLab/preble, multi_node/global_scheduler_with_time.py).

It exploits a prefix that is the larger part of a prompt, and otherwise explores where the least is lost.

    exploit, if what is new in a prompt is shorter than what its path in the tree holds: the engines that the nearest
    node of the path is assigned to, the least cost among several
    explore, else: of all engines the least cost

    cost(g) = load(g) + eviction(g), seconds
    load(g) = sum over the nodes asked for within 3 minutes and assigned to g of
              miss_rate(n) requests(n) prefill_s(n) / assigned(n) + active(n, g) answer_tokens(n) tpot(g)
    eviction(g) = sum over the least recently used nodes of g that make room for what is new, of
                  miss_rate(n) requests(n) prefill_s(n), where n is longer than the path above it

A request counts for the nearest node of its path that is longer than the path above it. `tpot` is the median of the
last 200 answers (0.15 s before any). Prefill times are each engine's own, where the code has those of its authors' GPU;
an engine's memory is its own, too. Its rebalancing, which that code defines and no longer calls, is left out. Reads
only, but for what it was told of its own requests.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import fmean, median
from typing import TYPE_CHECKING

from farhop_lab.engine.core.text import TOKEN_BYTES
from farhop_lab.sim.baselines.caches import EngineCaches
from farhop_lab.sim.baselines.router import text_of
from farhop_lab.sim.baselines.tree import common

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.process import EnginePool
    from farhop_lab.sim.baselines.router import Ended, RouterState

WINDOW_S = 180.0
TPOT_S, TPOTS = 0.15, 200
ANSWER_TOKENS = 45
MEMORY_TOKENS = 198_516


class _Node:
    __slots__ = (
        "active",
        "answers",
        "assigned",
        "before",
        "children",
        "label",
        "max_tokens",
        "misses",
        "parent",
        "requests",
        "tokens",
    )

    def __init__(self, label: bytes, parent: _Node | None) -> None:
        self.label, self.parent = label, parent
        self.before: int = 0 if parent is None else parent.end
        self.children: dict[int, _Node] = {}
        self.assigned: set[str] = set()
        self.active: dict[str, int] = {}
        self.answers: list[int] = []
        self.max_tokens = ANSWER_TOKENS
        self.requests = self.tokens = self.misses = 0  # within the window: how many, their tokens, those not cached

    @property
    def end(self) -> int:
        """Bytes from the root to its end."""
        return self.before + len(self.label)

    @property
    def large(self) -> bool:
        """Whether it is longer than the path above it."""
        return len(self.label) > self.before

    def path(self) -> Iterator[_Node]:
        """Itself and those above it but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class E2:
    """How it picks. See the module's head."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self._caches = EngineCaches(pools)
        self.root = _Node(b"", None)
        self.window: deque[tuple[float, _Node, int, int]] = deque()
        self._counted: dict[_Node, None] = {}
        self._tpots: dict[str, deque[float]] = {}
        self.held: dict[str, OrderedDict[_Node, None]] = {}  # an engine's nodes, least recently used first
        self.held_bytes: dict[str, int] = {}
        self._memory_bytes: dict[str, int] = {}
        self._sent: dict[str, tuple[_Node, _Node, str]] = {}

    # -- picking

    def choose(self, request: Request, among: Sequence[str], state: RouterState, now: float) -> str:
        """See router.Picker."""
        self.forget(now)
        text = text_of(request)
        node, depth = self._find(text)
        new = len(text) - depth or depth - node.before  # what would be its own node
        assigned = self._assigned(node) if new < len(text) - new else None
        able = [name for name in among if assigned is None or name in assigned] or list(among)
        if len(able) == 1:
            return able[0]
        loads = self.loads(able, state)
        return min(able, key=lambda name: loads[name] + self._eviction_s(new, name, state))

    def _find(self, text: bytes) -> tuple[_Node, int]:
        """The last node on the text's path, and how many of its bytes the tree holds."""
        node, at = self.root, 0
        while at < len(text) and (child := node.children.get(text[at])) is not None:
            same = common(text, at, child.label)
            at += same
            node = child
            if same < len(child.label):
                break
        return node, at

    def _assigned(self, node: _Node) -> Collection[str] | None:
        return next((one.assigned for one in node.path() if one.assigned), None)

    def _prefill_s(self, node: _Node, name: str, state: RouterState) -> float:
        return len(node.label) / TOKEN_BYTES * state.targets[name].prefill_ms_per_token / 1e3

    def _lost_s(self, node: _Node, name: str, state: RouterState) -> float:
        miss_rate = node.misses / node.tokens if node.tokens else 1.0
        return miss_rate * (node.requests or node.active.get(name, 0)) * self._prefill_s(node, name, state)

    def loads(self, among: Sequence[str], state: RouterState) -> dict[str, float]:
        loads = dict.fromkeys(among, 0.0)
        tpots = {name: median(self._tpots.get(name) or (TPOT_S,)) for name in among}
        for node in self._counted:
            for name in node.assigned & loads.keys():
                answer = fmean(node.answers) if node.answers else node.max_tokens
                loads[name] += self._lost_s(node, name, state) / len(node.assigned)
                loads[name] += node.active.get(name, 0) * answer * tpots[name]
        return loads

    def _eviction_s(self, new_bytes: int, name: str, state: RouterState) -> float:
        """It takes memory as always full, as published."""
        lost_s = 0.0
        for node in self.held.get(name, ()):
            if new_bytes <= 0:
                break
            if not node.active.get(name, 0):
                new_bytes -= len(node.label)
                lost_s += self._lost_s(node, name, state) if node.large else 0.0
        return lost_s

    # -- remembering

    def sent(self, request: Request, target: str, state: RouterState, now: float) -> None:
        """See router.Picker."""
        text = text_of(request)
        leaf = self._insert(text)
        counted = next((node for node in leaf.path() if node.large), leaf)
        counted.max_tokens = request.max_tokens or ANSWER_TOKENS
        misses = len(leaf.label)
        counted.requests += 1
        counted.tokens += len(text)
        counted.misses += misses
        self._counted[counted] = None
        self.window.append((now, counted, len(text), misses))
        self._sent[request.id] = counted, leaf, target
        held = self.held.setdefault(target, OrderedDict())
        for node in leaf.path():
            node.assigned.add(target)
            node.active[target] = node.active.get(target, 0) + 1
            if node not in held:
                self.held_bytes[target] = self.held_bytes.get(target, 0) + len(node.label)
            held[node] = None
            held.move_to_end(node)
        self._evict(target, state)

    def _insert(self, text: bytes) -> _Node:
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = _Node(text[at:], node)
            else:
                same = common(text, at, child.label)
                if same < len(child.label):
                    child = self._split(child, same)
            at += len(child.label)
            node = child
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; the upper one, which is returned, is assigned and held as the whole was."""
        parent = node.parent
        assert parent is not None, "the root has no label to split"
        upper = _Node(node.label[:at], parent)
        parent.children[upper.label[0]] = upper
        upper.assigned, upper.active = set(node.assigned), dict(node.active)
        node.label, node.parent, node.before = node.label[at:], upper, upper.end
        upper.children[node.label[0]] = node
        if upper.large and not node.large:  # from here on the requests of both count for it
            upper.requests, upper.tokens, upper.misses = node.requests, node.tokens, node.misses
            upper.answers, upper.max_tokens = node.answers, node.max_tokens
            node.requests = node.tokens = node.misses = 0
            node.answers = []
            if self._counted.pop(node, 0) is None:
                self._counted[upper] = None
            self.window = deque((at_s, upper if one is node else one, a, b) for at_s, one, a, b in self.window)
            self._sent = {k: (upper if one is node else one, leaf, to) for k, (one, leaf, to) in self._sent.items()}
        for held in self.held.values():
            if node in held:
                held[upper] = None
        return upper

    def _evict(self, name: str, state: RouterState) -> None:
        if name not in self._memory_bytes:
            gpu = self._caches.gpu(name, state)
            self._memory_bytes[name] = TOKEN_BYTES * (gpu.core.profile.kv_tokens if gpu else MEMORY_TOKENS)
        over = self.held_bytes[name] - self._memory_bytes[name]
        held = self.held[name]
        for node in list(held) if over > 0 else ():
            if over <= 0:
                break
            if not node.active.get(name, 0):
                del held[node]
                over -= len(node.label)
                self.held_bytes[name] -= len(node.label)

    def forget(self, now: float) -> None:
        """Drop what was requested longer ago than the window. A node that is no longer requested has no engine."""
        while self.window and self.window[0][0] < now - WINDOW_S:
            _, node, tokens, misses = self.window.popleft()
            node.requests -= 1
            node.tokens -= tokens
            node.misses -= misses
            if not node.requests:
                self._counted.pop(node, None)
                node.assigned = set()

    def began(self, request_id: str) -> None:
        """See router.Learner."""

    def ended(self, what: Ended) -> None:
        """See router.Learner."""
        counted, leaf, target = self._sent.pop(what.id)
        for node in leaf.path():
            node.active[target] -= 1
        if what.after_s is not None and what.usage is not None and what.usage.completion_tokens > 1:
            tokens = what.usage.completion_tokens
            counted.answers = [*counted.answers[-TPOTS:], tokens]
            self._tpots.setdefault(target, deque((TPOT_S,), TPOTS)).append(what.after_s / tokens)
