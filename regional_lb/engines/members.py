"""The region's current replicas: those announced, the models that their engines report, and those that are leaving.

Invariants: a replica that is no longer announced gets no new work, and stays until it is idle or `leave_s` is over;
whatever exceeds the size of a report (models, kinds of GPU) is left out in the order of the announcement, and named.
Pure: no IO, no clock. Never considers health.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from farhop.balance.model_facts import UNKNOWN_FACTS, ModelFacts
from farhop.store.documents.report import BASES_LIMIT, COUNT_LIMIT, GPU_TYPES_LIMIT, MODELS_LIMIT, TEXT_LIMIT
from regional_lb.engines.config import MODELS_MAX
from regional_lb.engines.signals.exposition import PageError
from regional_lb.fleet.view import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from regional_lb.engines.config import ReplicaConfig
    from topology.lineage import Bases


# Chats in vLLM go through templates, which may trim what they are given; SGLang puts the text behind them as it is.
_WRITES_ON: dict[str, Literal["solid", "text"]] = {"vllm": "solid", "sglang": "text"}


class Listing(msgspec.Struct, frozen=True):
    """What an engine's /v1/models says: `ids` in its order, and every other name (root, parent) of one of them; by id,
    of those beyond `ids`, too, what it is based on: an adapter on its parent (`adapters`), another name on its root;
    None where that cannot be read; and by id, what clients may learn of it (`facts`). `engine`: which engine answers
    (`owned_by`); `slots`: how many requests it runs at once, None if it does not say."""

    ids: tuple[str, ...]
    names: frozenset[str]
    bases: dict[str, Bases] = {}
    adapters: frozenset[str] = frozenset()
    facts: dict[str, ModelFacts] = {}
    engine: str = ""
    slots: int | None = None


SLOTS = 256  # of an engine that does not report them; vLLM's default on most GPUs
_T = TypeVar("_T", str, int)
_UNLISTED = Listing((), frozenset())


_NONE = msgspec.Raw(b"null")
_OBJECTS_MAX = 4096  # one for each model, one for its permissions: reading this many takes 4 ms


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: msgspec.Raw = _NONE  # of engines that have no such thing it may be anything
    owned_by: msgspec.Raw = _NONE


class _Models(msgspec.Struct):
    data: list[_Model]


class _OddModel(msgspec.Struct):
    id: str
    root: msgspec.Raw = _NONE
    parent: msgspec.Raw = _NONE
    max_model_len: msgspec.Raw = _NONE
    owned_by: msgspec.Raw = _NONE


class _OddModels(msgspec.Struct):
    data: list[msgspec.Raw]


_decoder = msgspec.json.Decoder(_Models)
_odd_decoder, _odd_model_decoder = msgspec.json.Decoder(_OddModels), msgspec.json.Decoder(_OddModel)
_ODD_MAX, _COMMAS_MAX = 512, 65_536  # what is odd is read slowly
_MODEL = re.compile(r"[!-~]{1,256}")


def read_listing(body: bytes) -> Listing:
    """The answer to an OpenAI-like `GET /v1/models`. Raises PageError if it is none, or lists nothing. An entry that
    names no model is passed over: it must not hide what the others are based on from the law."""
    if body.count(b"{") > _OBJECTS_MAX:  # no escape stands for it, as one may for a letter of `id`
        raise PageError("size", f"/v1/models: more than {_OBJECTS_MAX} objects")
    try:
        models, untold = _decoder.decode(body).data, frozenset[str]()
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        models, untold = _read_odd(body, error)
    ids = tuple(dict.fromkeys(model.id for model in models if _MODEL.fullmatch(model.id)))
    if not ids:
        raise PageError("missing", "/v1/models lists no model that could be asked for")
    names = {name for model in models for name in (model.id, model.root, model.parent) if name}
    bases: dict[str, Bases] = dict.fromkeys(untold)
    for model in models:
        is_adapter = model.parent and model.parent != model.id
        base = model.parent if is_adapter else model.root  # the root of an adapter is but where its weights lie
        reported = {base} if base and base != model.id else set()
        before = bases.get(model.id, frozenset())
        bases[model.id] = None if before is None else before | reported
    adapters = frozenset(model.id for model in models if model.parent and model.parent != model.id)
    ids = ids[:MODELS_MAX]
    by_id = {model.id: model for model in reversed(models)}
    facts = {model: known for model in ids if (known := _facts(by_id[model])) != UNKNOWN_FACTS}
    return Listing(ids, frozenset(names), bases, adapters, facts, _value(by_id[ids[0]].owned_by, str) or "")


def _read_odd(body: bytes, error: Exception) -> tuple[list[_Model], frozenset[str]]:
    """The models of a listing of which not all is as it should be, and those whose base cannot be read. Raises
    PageError, `error` where it is no listing at all."""
    models, untold = list[_Model](), set[str]()
    try:
        if body.count(b",") > _COMMAS_MAX or len(entries := _odd_decoder.decode(body).data) > _ODD_MAX:
            raise PageError("size", f"/v1/models: {error}, and too much to look at each")
    except (ValueError, RecursionError):
        raise PageError("malformed", f"/v1/models: {error}") from None
    for entry in entries:
        with contextlib.suppress(ValueError, RecursionError):
            odd = _odd_model_decoder.decode(entry)
            root, parent = _value(odd.root, str), _value(odd.parent, str)
            models.append(_Model(odd.id, root, parent, odd.max_model_len, odd.owned_by))
            if (parent is None and odd.parent != _NONE) or (not parent and root is None and odd.root != _NONE):
                untold.add(odd.id)
    return models, frozenset(untold)


def _facts(model: _Model) -> ModelFacts:
    """The engine's facts of a model, within what a report can hold."""
    most = _value(model.max_model_len, int) or 0
    known = most if 0 < most <= COUNT_LIMIT else 0
    return ModelFacts(known, _short(model.root), _short(model.parent))


def _value(raw: msgspec.Raw, kind: type[_T]) -> _T | None:
    """The value, if it has this type; else None."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except ValueError:
        return None


def _short(name: str | None) -> str:
    return name if name and name.isprintable() and len(name.encode()) <= TEXT_LIMIT else ""


class Members:
    """See the module's docstring. `leave_s` is how long one that is announced no more may take to finish."""

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._announced: dict[str, ReplicaConfig] = {}
        self._leaving: dict[str, tuple[ReplicaConfig, float]] = {}
        self._listings: dict[str, Listing] = {}
        self._slots: dict[str, tuple[bool, int]] = {}  # by its metrics; how many
        self.left_out: dict[str, str] = {}  # why, by name

    @property
    def watched(self) -> dict[str, ReplicaConfig]:
        """All replicas to be watched, by name."""
        return {name: config for name, (config, _) in self._leaving.items()} | self._announced

    @property
    def leaving(self) -> int:
        """How many are announced no more, and not gone yet."""
        return len(self._leaving)

    def announce(self, configs: Sequence[ReplicaConfig], now: float) -> bool:
        """Replace the set of replicas (with unique names). Returns whether anything changed."""
        before, self._announced = self._announced, {config.label: config for config in configs}
        if list(before.items()) == list(self._announced.items()):
            return False
        for name, config in before.items():
            if name not in self._announced:
                self._leaving[name] = config, now + self._leave_s
        for name, config in self._announced.items():
            was = before.get(name) or self._leaving.get(name, (None, 0.0))[0]
            if was is not None and was.address != config.address:
                self._forget(name)  # another process: what the one before served says nothing
            self._leaving.pop(name, None)
        return True

    def listed(self, name: str, listing: Listing) -> bool:
        """An engine reported its models. Returns whether that changed anything; mostly it does not."""
        config = self._config(name)
        if config is None:
            return False
        before = self._listings.get(name)
        self._listings[name] = listing
        return _served_as(config, before) != _served_as(config, listing)

    def runs(self, name: str, slots: int, *, by_metrics: bool) -> bool:
        """An engine's metrics said how many requests it runs at once, or the configuration did: this counts only if no
        other source says it. Returns whether that changed anything."""
        config, before = self._config(name), self._slots.get(name)
        if config is None or (before is not None and before[0] > by_metrics):
            return False
        self._slots[name] = by_metrics, slots
        return config.slots is None and (before is None or before[1] != slots)

    def _forget(self, name: str) -> None:
        self._listings.pop(name, None)
        self._slots.pop(name, None)

    def slots(self, name: str) -> int | None:
        """How many requests its engine runs at once, as it reports; None if it never did."""
        return self._listings.get(name, _UNLISTED).slots

    def missing(self, name: str) -> frozenset[str]:
        """Which of the models configured for it its engine does not list."""
        config = self._config(name)
        return frozenset() if config is None else _missing(config, self._listings.get(name))

    def sweep(self, now: float, idle: Callable[[str], bool]) -> bool:
        """Remove leaving replicas that are idle, or whose time is over. Returns whether there were any."""
        gone = [name for name, (_, until) in self._leaving.items() if now >= until or idle(name)]
        for name in gone:
            del self._leaving[name]
            self._forget(name)
        return bool(gone)

    def replicas(self) -> list[Replica]:
        """All replicas as the view has them, within what a report can hold. Updates `left_out`."""
        models: set[str] = set()
        kinds: set[str] = set()
        kept: list[Replica] = []
        self.left_out = {}
        for replica in self._all():
            if len(models | replica.models) > MODELS_LIMIT:
                self.left_out[replica.name] = f"more than {MODELS_LIMIT} models in one balancer; run several"
            elif len(kinds | {replica.gpu}) > GPU_TYPES_LIMIT:
                self.left_out[replica.name] = f"more than {GPU_TYPES_LIMIT} kinds of GPU in one balancer; run several"
            else:
                models |= replica.models
                kinds.add(replica.gpu)
                kept.append(replica)
        return kept

    def _config(self, name: str) -> ReplicaConfig | None:
        return self._announced.get(name) or self._leaving.get(name, (None, 0.0))[0]

    def _all(self) -> Iterable[Replica]:
        for name, config in self._announced.items():
            yield _replica(config, self._listings.get(name), self._slots.get(name), config.draining)
        for name, (config, _) in self._leaving.items():
            yield _replica(config, self._listings.get(name), self._slots.get(name), draining=True)


def _replica(config: ReplicaConfig, listing: Listing | None, runs: tuple[bool, int] | None, draining: bool) -> Replica:
    reported = (listing.slots if listing is not None else None) or (runs[1] if runs is not None else None)
    engine = config.engine or (listing.engine if listing is not None else "")
    return Replica(
        name=config.label,
        address=config.address,
        models=_models(config, listing),
        gpu=config.gpu,
        slots=config.slots or reported or SLOTS,
        kv_tokens=config.kv_tokens,
        prefill_tokens_max=config.prefill_tokens_max,
        prefill_ms_per_token=config.prefill_ms_per_token,
        tpot_ms=config.tpot_ms,
        draining=draining,
        missing=_missing(config, listing),
        version=config.version,
        kv_ranks=len(config.kv_sources),
        adapters=_adapters(config, listing),
        lineage=_lineage(config, listing),
        facts=listing.facts if listing is not None else {},
        role=config.role,
        handover=config.handover,
        bootstrap_port=config.bootstrap_port,
        token_ids=engine == "vllm",
        writes_on=_WRITES_ON.get(engine, ""),
    )


def _models(config: ReplicaConfig, listing: Listing | None) -> frozenset[str]:
    return frozenset(config.models or (listing.ids if listing is not None else ())).union(config.adapters)


def _adapters(config: ReplicaConfig, listing: Listing | None) -> frozenset[str]:
    """The configured adapters, and those among the served models that the engine itself calls adapters."""
    listed = listing.adapters if listing is not None else frozenset[str]()
    return (listed & _models(config, listing)).union(config.adapters)


def _lineage(config: ReplicaConfig, listing: Listing | None) -> dict[str, Bases]:
    """What each model served there is based on, by configuration and by its engine's report. A configured adapter's
    base is one of the models configured beside it or, if there are none, of those that its engine lists."""
    known = listing if listing is not None else _UNLISTED
    lineage: dict[str, Bases] = {}
    for model in _models(config, listing):
        reported = _bases(model, known)
        if model not in config.adapters or reported is None:
            lineage[model] = reported
            continue
        bases = (reported if model in known.adapters else frozenset()) | frozenset(config.models)
        bases = bases or frozenset(known.ids) - known.adapters - frozenset(config.adapters)
        bases -= {model}
        # Of more than a report names none may be left out: its rule would bind no more.
        lineage[model] = bases if 0 < len(bases) <= BASES_LIMIT else None
    return lineage


def _bases(model: str, listing: Listing) -> Bases:
    """All that a model is based on by its engine's report, step by step: a base need not be served here itself, nor
    have a name that could be asked for."""
    found, ahead = set[str](), [model]
    while ahead and len(found) <= BASES_LIMIT:
        reported = listing.bases.get(ahead.pop(), frozenset())
        if reported is None:
            return None
        new = reported - found - {model}
        found |= new
        ahead += new
    # Of more than a report names none may be left out. A longer name can have no rule.
    named = frozenset(name for name in found if len(name) <= TEXT_LIMIT and name.isprintable())
    return named if len(found) <= BASES_LIMIT else None


def _served_as(config: ReplicaConfig, listing: Listing | None) -> tuple[object, ...]:
    known = listing if listing is not None else _UNLISTED
    rest = known.facts, known.slots, known.engine
    return _models(config, listing), _missing(config, listing), _lineage(config, listing), *rest


def _missing(config: ReplicaConfig, listing: Listing | None) -> frozenset[str]:
    return config.served - listing.names if listing is not None else frozenset()
