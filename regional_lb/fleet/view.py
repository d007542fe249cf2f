"""What the regional tier knows about its replicas: which there are (swapped as a whole) and each one's last sample.

A swap is for replicas that come and go; a sample replaces one replica's entry (only `Replicas` does that), since a
thousand replicas report twice a second. Never holds what must survive a swap: reservations are in the ledger, health
and speed in the flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

import msgspec
from msgspec.structs import replace

from farhop.balance.machine import Address, Carrier, Event
from farhop.balance.model_facts import UNKNOWN_FACTS, ModelFacts, together
from regional_lb.fleet.kv_events import KvEvent
from topology.lineage import Bases

_START_SLACK_S = 0.5  # a process starts once, but some compute the time anew for each page


class Lora(msgspec.Struct, frozen=True):
    """An engine's LoRA adapters: those with running or waiting requests, and how many it keeps loaded at once."""

    max: int
    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()


class Sample(msgspec.Struct, frozen=True):
    """One scrape of a replica's metrics. None: the engine does not report the figure."""

    at: float  # when it was received here, in monotonic seconds
    waiting: int  # requests
    running: int  # requests
    kv_usage: float | None = None  # the share (0..1) of the KV cache that running requests hold
    kv_tokens: int | None = None  # the size of the whole KV cache
    prefix_queries: float = 0.0  # prompt tokens looked up in the prefix cache since the engine began; status pages only
    prefix_hits: float = 0.0  # those of them that were cached
    lora: Lora | None = None
    # How many of `waiting` do queue; None: all. 0 if one waits and none did at the scrape before: that one came since
    # the engine's last step, and will be in the next.
    queued: int | None = None
    started_at: float | None = None  # when its process began, in the engine's own seconds
    slots: int | None = None  # how many requests it runs at once
    since: float | None = None  # since when scrapes say the same; None: this one is the first to
    asleep: bool = False  # its memory was taken from it: it answers nothing, and what it cached is gone

    def restarted(self, before: Sample) -> bool:
        """Whether this is as good as another process than the earlier sample's: it started later, its counters ran
        backwards, or it fell asleep."""
        if self.asleep and not before.asleep:
            return True
        if self.started_at is not None and before.started_at is not None:
            return self.started_at - before.started_at > _START_SLACK_S
        return self.prefix_queries < before.prefix_queries or self.prefix_hits < before.prefix_hits

    def moved(self, before: Sample) -> bool:
        """Whether the engine did anything since. The number waiting does not count: a server reports it for an engine
        that hangs."""
        ours = (self.running, self.kv_usage, self.prefix_queries, self.prefix_hits)
        return ours != (before.running, before.kv_usage, before.prefix_queries, before.prefix_hits)

    def same(self, before: Sample) -> bool:
        """Whether the two samples are equal except for their time."""
        return replace(self, at=before.at, since=before.since) == before

    def repeats(self, before: Sample) -> bool:
        """Whether the engine says the same as before, whatever was made of it."""
        return replace(self, at=before.at, queued=before.queued, since=before.since) == before

    @property
    def hit_share(self) -> float | None:
        """The share of the prompt tokens looked up that was cached; None before the first, or if the engine does not
        report it."""
        return min(1.0, self.prefix_hits / self.prefix_queries) if self.prefix_queries else None


class Replica(msgspec.Struct, frozen=True):
    """One engine endpoint."""

    name: str
    address: Address
    models: frozenset[str]
    gpu: str  # the kind of GPU
    slots: int  # how many sequences it runs at once
    kv_tokens: int  # the size of its KV cache
    # How many prompt tokens it computes in a step. While that many are on their way to it, no request is sent; if
    # several requests wait, the next step is filled, too.
    prefill_tokens_max: int
    prefill_ms_per_token: float  # first guesses: the true speed is measured
    tpot_ms: float
    draining: bool = False  # requests under way end there, and no new ones are sent
    missing: frozenset[str] = frozenset()  # those of `models` that the engine itself does not list
    kv_ranks: int = 0  # for how many caches it publishes KV events; 0: for none
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    sample: Sample | None = None  # the last scrape; None: none yet
    version: str = ""  # the version of all its models; "": versions are not distinguished
    # "prefill": it computes prompts for other replicas and answers no client.
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    # How a computed prompt is passed on. SGLang's engines meet at the prefill replica's `bootstrap_port`, and one of
    # role "decode" serves only such requests.
    handover: Literal["vllm", "sglang"] = "vllm"
    bootstrap_port: int = 0  # 0: none
    lineage: dict[str, Bases] = {}  # the models that each model is based on
    facts: dict[str, ModelFacts] = {}  # reported by the engine about its models
    # It streams token ids and takes prompts as tokens, so that a broken stream can continue there.
    token_ids: bool = False
    # Which text of an unfinished answer it continues: "" none, "text" any; "solid": its chat templates may trim white
    # space, so only text that neither begins nor ends with it.
    writes_on: Literal["", "solid", "text"] = ""

    def context_tokens(self, model: str) -> float:
        """The longest request of a model, prompt and answer together, that it can hold: by what its engine says of the
        model (of an adapter, of what that is based on) and of its whole cache; infinite where it says neither."""
        facts = self.facts.get(model, UNKNOWN_FACTS)
        length = facts.max_model_len or self.facts.get(facts.parent, UNKNOWN_FACTS).max_model_len
        cache = self.sample.kv_tokens if self.sample is not None else None
        return min(length or inf, cache or inf)

    def takes_up(self, carrier: Carrier) -> bool:
        """Whether a stream can be continued there from this carrier (token ids or text)."""
        if carrier == "ids":
            return self.token_ids
        return self.writes_on == "text" or self.writes_on == carrier

    @property
    def decode_only(self) -> bool:
        """Whether it only answers requests that another replica prefills."""
        return self.role == "decode" and self.handover == "sglang"


class View(msgspec.Struct, frozen=True):
    """All replicas by name, and the names of those that serve a model, or (`by_variant`) a model or a version of it, of
    those that only prefill for it (`prefillers`, by variant), and of those that are `decode_only`."""

    replicas: dict[str, Replica]
    by_model: dict[str, tuple[str, ...]]
    by_variant: dict[str, tuple[str, ...]]
    prefillers: dict[str, tuple[str, ...]] = {}
    decode_only: frozenset[str] = frozenset()

    def unable_to_resume(self, model: str, carrier: Carrier) -> tuple[str, ...]:
        """The replicas of a model that cannot continue a stream from this carrier."""
        return tuple(name for name in self.by_model.get(model, ()) if not self.replicas[name].takes_up(carrier))

    def sampled_at(self, process: tuple[str, ...]) -> float:
        """When a replica (`process`: its name) was last sampled, monotonic seconds."""
        replica = self.replicas.get(process[0])
        return replica.sample.at if replica is not None and replica.sample is not None else -inf

    def facts(self, model: str) -> ModelFacts:
        """The facts about a model that hold at all replicas that serve it."""
        return together(self.replicas[name].facts.get(model, UNKNOWN_FACTS) for name in self.by_model[model])

    def alike(self, replica: Replica) -> list[tuple[str, ...]]:
        """For each of its models, the replicas that do the same work as this one, itself included."""
        if replica.role == "prefill":
            return [self.prefillers[prefill_variant(model, replica.handover)] for model in replica.models]
        return [self.by_model[model] for model in replica.models]


def variant_of(model: str, version: str) -> str:
    """The variant that a request waits for: a version of a model or, with "", the model in any version.

    Model names have no spaces (the configuration ensures it), so a variant names one model and one version.
    """
    return f"{model} {version}" if version else model


def prefill_variant(model: str, handover: str) -> str:
    """The variant of the replicas that prefill for a model by this protocol; distinct, as versions contain no slash."""
    return variant_of(model, f"/prefill/{handover}")


def model_of(variant: str) -> str:
    """The model of a variant."""
    return variant.partition(" ")[0]


def view_of(replicas: list[Replica]) -> View:
    """Index replicas. Names are unique (configuration sees to it)."""
    by_model: dict[str, list[str]] = {}
    by_version: dict[str, list[str]] = {}
    prefillers: dict[str, list[str]] = {}
    for replica in replicas:
        for model in sorted(replica.models):
            if replica.role == "prefill":
                prefillers.setdefault(prefill_variant(model, replica.handover), []).append(replica.name)
                continue
            by_model.setdefault(model, []).append(replica.name)
            if replica.version:
                by_version.setdefault(variant_of(model, replica.version), []).append(replica.name)
    models = {model: tuple(names) for model, names in by_model.items()}
    halves = {variant: tuple(names) for variant, names in prefillers.items()}
    variants = models | {variant: tuple(names) for variant, names in by_version.items()}
    decode_only = frozenset(replica.name for replica in replicas if replica.decode_only)
    return View({r.name: r for r in replicas}, models, variants | halves, halves, decode_only)


class ViewSwapped(Event, frozen=True):
    """A new view replaces the former one. A replica whose sample is None keeps its last one."""

    view: View


class ReplicaSampled(Event, frozen=True):
    """A replica's metrics were scraped."""

    target: str
    sample: Sample


class ReplicaProbed(Event, frozen=True):
    """An active probe of a replica came back. `fault`: something broken that the probe does not see (a GPU), "" if
    nothing is known. `ready`: whether the replica says that it takes work. `strain`: why it should get less work, "" if
    nothing."""

    target: str
    ok: bool
    fault: str = ""
    ready: bool = True
    strain: str = ""


class BlocksChanged(Event, frozen=True):
    """Changes of a replica's KV cache number `rank`, in order, or of how much is known about it."""

    target: str
    rank: int
    changes: Sequence[KvEvent]
