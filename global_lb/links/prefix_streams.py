"""The prefixes that regions hold: their prefix streams, applied to the trie, and the prefixes sent there and not yet
confirmed.

Invariants: a region holds a node while any of its instances does, or while we sent it there and it may yet be
confirmed; a new snapshot replaces the old one when it is complete, so that the prefixes are never all forgotten; an
invalid message is rejected whole, and its stream begins again; work between two turns is bounded: long work is an
iterator that stops where other tasks may run, and its driver decides what runs there. Never decides, never awaits.

Memory: beside the trie's entry, one of a NodeMap per node and instance (27 to 54 B; the integer is shared).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance.prefix.chain import DEPTH_MAX
from farhop.balance.prefix.nodes import NodeMap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from farhop_wire import region_pb2

    from farhop.balance.prefix.trie import PrefixTrie

    Count = Generator[None, None, int]
    Content = list[tuple[str, int, tuple[int, ...]]]  # "stored" below this parent, "evicted", "cleared": nodes

FORGET_S = 60.0  # what an instance reported is kept for this long after its stream ended
CONFIRM_S = 5.0  # what we sent, and its region has not confirmed after once to twice this, is gone
MESSAGE_NODES_MAX = 16_384
_NODES_READ = MESSAGE_NODES_MAX + 1  # of one change: enough to be too many
INSTANCE_NODES_MAX = 1 << 20
SENT_NODES_MAX = 262_144  # beyond it what we send a region is kept until its next snapshot, or is evicted with age
TURN_NODES = 256  # applied in one turn: some 0.5 ms
_TURN_FREED = 4000  # given back in one turn
STALE_MAX = 8


class PrefixGapError(Exception):
    """The stream does not continue from the known state: ask again. The text says why."""


class _Instance:
    """What one regional balancer reported. `arriving` is the snapshot under way, `stale` are those that were
    never whole; `session` counts its streams."""

    __slots__ = (
        "arriving",
        "connected",
        "incarnation",
        "known",
        "lost_at",
        "nodes",
        "seq",
        "session",
        "slice",
        "snapshot_id",
        "stale",
    )  # fmt: skip

    def __init__(self) -> None:
        self.nodes = NodeMap()
        self.arriving: NodeMap | None = None
        self.stale: list[NodeMap] = []
        self.incarnation = self.seq = self.session = self.slice = self.snapshot_id = 0
        self.connected = False  # a stream is open, and its snapshot, if there was one, whole
        self.known = False  # it ever was
        self.lost_at: float | None = None

    def whole(self) -> None:
        """The snapshot is complete."""
        self.connected = self.known = True
        self.lost_at = None

    def abandon(self) -> None:
        """The snapshot will not be completed: keep what was received, and start the next stream with a new snapshot.

        What is too much to keep stays in the trie, until the next whole snapshot or until it is evicted with age.
        """
        if self.arriving is not None:
            if len(self.stale) < STALE_MAX:
                self.stale.append(self.arriving)
            elif self.stale[-1].most + self.arriving.most <= INSTANCE_NODES_MAX:
                self.stale[-1].put(self.arriving)
            self.arriving = None
            self.incarnation = self.seq = 0

    def holds_unfinished(self, node: int) -> bool:
        """Whether a snapshot that is not whole has this node. In most cases `nodes` has it, so that is asked first."""
        if self.arriving is not None and node in self.arriving:
            return True
        return bool(self.stale) and any(node in nodes for nodes in self.stale)


class _Region:
    """The instances of one region, and what was sent there in this period (`young`) and the one before (`old`)."""

    __slots__ = ("instances", "old", "old_nodes", "steady", "young", "young_nodes")

    def __init__(self) -> None:
        self.instances: dict[str, _Instance] = {}
        self.young: list[Sequence[int]] = []
        self.old: list[Sequence[int]] = []
        self.old_nodes, self.young_nodes = NodeMap(), NodeMap()
        self.steady = False  # all instances were connected in the whole period

    def holds(self, node: int) -> bool:
        for one in self.instances.values():  # noqa: SIM110 - any() takes twice as long, and every node is asked for
            if node in one.nodes or one.holds_unfinished(node):
                return True
        return False

    @property
    def known(self) -> bool:
        return any(one.known for one in self.instances.values())

    @property
    def connected(self) -> bool:
        return bool(self.instances) and all(one.connected for one in self.instances.values())


class Prefixes:
    """All regions. `refused` counts rejected messages by reason; `law_epoch` is that of the law in force here, `places`
    those that its map has us in."""

    def __init__(
        self, trie: PrefixTrie, refused: Callable[[str], None], law_epoch: int = 0, forget_s: float = FORGET_S
    ) -> None:
        self._trie, self._refused, self._forget_s = trie, refused, forget_s
        self.regions: dict[str, _Region] = {}
        self.discarded: list[NodeMap] = []
        self.law_epoch, self.places = law_epoch, 0

    # -- by the links

    def begin(self, name: tuple[str, str]) -> PrefixStream:
        """A stream of this (region, instance) begins; an earlier one of it is void."""
        region = self.regions.setdefault(name[0], _Region())
        instance = region.instances.setdefault(name[1], _Instance())
        instance.session += 1
        instance.abandon()
        return PrefixStream(self, name, region, instance)

    def state(self, region: str) -> str:
        """ "connected": all instances report; "behind": the state is old or incomplete; "never": no instance has ever
        reported.
        """
        known = self.regions.get(region)
        if known is None or not known.known:
            return "never"
        return "connected" if known.connected else "behind"

    def behind_s(self, region: str, now: float) -> float | None:
        """Seconds since the first of the silent instances fell silent; None if none is silent, or none ever
        reported.
        """
        known = self.regions.get(region)
        instances = known.instances.values() if known is not None else ()
        lost = [one.lost_at for one in instances if one.known and one.lost_at is not None]
        return now - min(lost) if lost else None

    # -- by the law

    def adopt(self, law_epoch: int, places: int = 0) -> None:
        """The law has this epoch, and by its map this balancer is in these places (`Law.places_of`). What came under
        the one before is kept (but see `begin_anew`). Nothing more is accepted that was requested under that one: it
        may be sent under a third law, which allowed what neither does."""
        self.law_epoch, self.places = law_epoch, places

    def begin_anew(self) -> None:
        """The law may now forbid prefixes that were reported or sent until now: forget them; each region reports the
        permitted ones again."""
        for region in self.regions.values():
            for one in region.instances.values():
                one.abandon()
                self.discarded += [one.nodes, *one.stale]
                one.nodes, one.stale, one.connected = NodeMap(), [], False
                one.incarnation = one.seq = 0
                one.session += 1  # the streams under way are void
            self.discarded += [region.old_nodes, region.young_nodes]
            region.young, region.old, region.young_nodes, region.old_nodes = [], [], NodeMap(), NodeMap()

    # -- by the flow

    def sent(self, region: str, chain: Sequence[int]) -> None:
        """A prompt began to be served in the region: add its chain, provisionally if the region reports its cache."""
        known = self.regions.get(region)
        if known is None or not chain or known.young_nodes.most >= SENT_NODES_MAX:
            return
        last, heard = chain[-1], False  # an instance that has a node has those above it, too
        for one in known.instances.values():  # as `holds` and `known`, without their frames: every answer asks
            if last in one.nodes or one.holds_unfinished(last):
                return
            heard = heard or one.known
        if heard and last not in known.young_nodes:
            known.young.append(chain)
            known.young_nodes.put(chain)

    # -- from time to time

    def tidy(self, now: float) -> Iterator[None]:
        """A period of CONFIRM_S is over: remove unconfirmed prefixes, and those that no stream has confirmed since."""
        while self.discarded:
            yield from _free(self.discarded.pop())
        for name, region in tuple(self.regions.items()):
            if not region.connected:
                region.steady = False  # what comes first when it is back is not silence about what we sent
            elif not region.steady:
                region.steady = True
            else:
                yield from self._take_back(name, region)
            for who, instance in tuple(region.instances.items()):
                if instance.lost_at is not None and now - instance.lost_at > self._forget_s:
                    del region.instances[who]
                    for nodes in (instance.nodes, *instance.stale):
                        yield from self._leave(name, region, nodes.drain())

    def _take_back(self, name: str, region: _Region) -> Iterator[None]:
        doubtful, region.old, region.young = region.old, region.young, []
        gone, region.old_nodes, region.young_nodes = region.old_nodes, region.young_nodes, NodeMap()
        doubtful.reverse()
        while doubtful:
            top = _first_missing(region, doubtful.pop())
            if top is not None and top not in region.old_nodes:
                yield from self._evict(name, region, top)
            if len(doubtful) % 256 == 0:
                yield
        yield from _free(gone)

    def _leave(
        self, name: str, region: _Region, nodes: Iterable[int], without: tuple[NodeMap, ...] = ()
    ) -> Iterator[None]:
        """Remove one instance from the holders of these nodes, except of those in `without`."""
        done = 0
        for node in nodes:  # of what is reported no more, or may change meanwhile
            done += 1
            if not region.holds(node) and not any(node in sent for sent in without):
                done += yield from self._evict(name, region, node)
            if done >= TURN_NODES:
                yield
                done = 0

    def _evict(self, name: str, region: _Region, node: int) -> Count:
        """The region holds this node no more, nor what descends from it; how many went in this turn."""
        while name in self._trie:
            gone = self._trie.evict(name, node, TURN_NODES)
            if gone < TURN_NODES:
                return gone
            yield
            if region.holds(node):
                break  # it was reported again
        return 0

    def _reconcile(self, name: str, region: _Region) -> Iterator[None]:
        """All instances have reported everything: what none of them holds, and we did not just send, is not there."""
        sent = (region.old_nodes, region.young_nodes)
        yield from self._leave(name, region, self._trie.all_nodes(), sent)


def _free(nodes: NodeMap) -> Iterator[None]:
    """Half a million integers take 20 ms to give back."""
    for count, _ in enumerate(nodes.drain()):
        if count % _TURN_FREED == _TURN_FREED - 1:
            yield


def _first_missing(region: _Region, chain: Sequence[int]) -> int | None:
    """The first node of this path that the region did not report."""
    low, high = 0, len(chain)
    while low < high:  # holding is monotone in depth
        middle = (low + high) >> 1
        if region.holds(chain[middle]):
            low = middle + 1
        else:
            high = middle
    return chain[low] if low < len(chain) else None


def read(message: region_pb2.PrefixDelta) -> Content | str:
    """Parse a message, or give the reason why it is invalid, before any of it is applied. Every field is read once,
    since that is most of a message's cost."""
    if message.incarnation <= 0 or not message.seq:
        return "prefixes_misplaced"
    if len(message.slice.paths) > MESSAGE_NODES_MAX or len(message.changes) > MESSAGE_NODES_MAX:
        return "prefixes_too_many"  # before they are copied: that takes 0.5 s a megabyte
    content: Content = []
    n_nodes = 0
    if message.HasField("slice"):
        for path in message.slice.paths:
            content.append(("stored", path.parent, nodes := tuple(path.nodes[:_NODES_READ])))
            n_nodes += len(nodes)
    else:
        for change in message.changes:
            what, parent, nodes = change.WhichOneof("what"), 0, ()
            if what == "stored":
                stored = change.stored
                parent, nodes = stored.parent, tuple(stored.nodes[:_NODES_READ])
            elif what == "evicted":
                nodes = tuple(change.evicted.nodes[:_NODES_READ])
            content.append((what or "", parent, nodes))
            n_nodes += len(nodes)
    if n_nodes > MESSAGE_NODES_MAX:
        return "prefixes_too_many"
    for kind, parent, nodes in content:
        if kind == "stored":
            distinct = set(nodes)
            if not distinct or len(nodes) > DEPTH_MAX or parent in distinct or 0 in distinct:
                return "prefixes_malformed"
            if len(distinct) < len(nodes):
                return "prefixes_duplicate"
    return content


class PrefixStream:
    """One stream from one instance. It may continue after `known_seq` of `known_incarnation`."""

    def __init__(self, prefixes: Prefixes, name: tuple[str, str], region: _Region, instance: _Instance) -> None:
        self._prefixes, self._region, self.instance = prefixes, region, instance
        self._name, self._who = name
        self._trie, self._session = prefixes._trie, instance.session
        self._under = prefixes.law_epoch, prefixes.places
        self.known_incarnation, self.known_seq = instance.incarnation, instance.seq

    def ended(self, now: float) -> None:
        """The stream is over, for whatever reason: the reported prefixes are kept for a while."""
        instance = self.instance
        if self._current:
            instance.connected = False
            instance.abandon()
            instance.lost_at = now if instance.lost_at is None else instance.lost_at

    @property
    def _current(self) -> bool:
        instance = self.instance
        return instance.session == self._session and self._region.instances.get(self._who) is instance

    def take(self, message: region_pb2.PrefixDelta, content: Content | str | None = None) -> Iterator[None]:
        """Apply one message, turn by turn; `content` is what `read` made of it, if it was. Raises PrefixGapError if it
        does not follow the one before, or is impossible."""
        if message.instance != self._who:
            content = "prefixes_misplaced"
        elif content is None:
            content = read(message)
        if isinstance(content, str):
            self._prefixes._refused(content)
            raise PrefixGapError(content)
        if not self._current:
            raise PrefixGapError("superseded, or forgotten meanwhile")
        if self._under != (self._prefixes.law_epoch, self._prefixes.places):
            raise PrefixGapError("asked under another law or map")
        self.instance.lost_at = None  # it speaks, even if not all is reported yet
        if message.HasField("slice"):
            yield from self._slice(message, content)
        else:
            yield from self._changes(message, content)

    def _gap(self, why: str) -> PrefixGapError:
        self._prefixes._refused("prefixes_gap")
        return PrefixGapError(why)

    def _slice(self, message: region_pb2.PrefixDelta, content: Content) -> Iterator[None]:
        instance, slice_ = self.instance, message.slice
        if slice_.slice == 0:
            instance.abandon()
            instance.arriving, instance.snapshot_id, instance.slice = NodeMap(), slice_.snapshot_id, 0
            instance.connected = False
        if instance.arriving is None or (slice_.snapshot_id, slice_.slice) != (instance.snapshot_id, instance.slice):
            raise self._gap("a slice is missing")
        instance.slice += 1
        done = 0
        for _, parent, path in content:
            self._stored(parent, path, instance.arriving)
            done = yield from self._turn(done + len(path))
        if not slice_.last:
            return
        before = (instance.nodes, *instance.stale)
        instance.nodes, instance.arriving, instance.stale = instance.arriving, None, []
        instance.incarnation, instance.seq = message.incarnation, message.seq
        instance.whole()
        prefixes, region = self._prefixes, self._region
        if region.connected and self._name in self._trie:
            yield from prefixes._reconcile(self._name, region)
            for nodes in before:
                yield from _free(nodes)
        else:
            for nodes in before:
                yield from prefixes._leave(self._name, region, nodes.drain())

    def _changes(self, message: region_pb2.PrefixDelta, content: Content) -> Iterator[None]:
        instance = self.instance
        if instance.arriving is not None or (message.incarnation, message.after) != (
            instance.incarnation,
            instance.seq,
        ):
            raise self._gap("changes are missing")
        done = 0
        for what, parent, nodes in content:
            if what == "stored":
                self._stored(parent, nodes, instance.nodes)
                done += len(nodes)
            elif what == "evicted":
                done = yield from self._evicted(nodes, done)
            elif what == "cleared":
                gone, instance.nodes = instance.nodes, NodeMap()
                yield from self._prefixes._leave(self._name, self._region, gone.drain())
            if done >= TURN_NODES:
                done = yield from self._turn(done)
        instance.seq = message.seq
        instance.whole()

    def _turn(self, done: int) -> Count:
        """Let others run once enough was done; what was superseded meanwhile goes no further."""
        if done < TURN_NODES:
            return done
        yield
        if not self._current:
            raise PrefixGapError("a newer stream took over")
        return 0

    def _stored(self, parent: int, nodes: tuple[int, ...], known: NodeMap) -> None:
        if parent and parent not in known:
            self._prefixes._refused("prefixes_unknown_parent")
            return
        if known.most + len(nodes) > INSTANCE_NODES_MAX and len(known) + len(nodes) > INSTANCE_NODES_MAX:
            self._prefixes._refused("prefixes_too_many")
            return
        known.put(nodes)
        if self._name in self._trie:
            # False where the parent was evicted here for want of room: then its children have none either.
            self._trie.extend(self._name, parent, nodes)

    def _evicted(self, nodes: tuple[int, ...], done: int) -> Count:
        region = self._region
        for node in nodes:
            self.instance.nodes.pop(node)
            done += 1
            if not region.holds(node):
                done += yield from self._prefixes._evict(self._name, region, node)
            done = (yield from self._turn(done)) if done >= TURN_NODES else done
        return done
