"""What the tags in a history's file stand for: the only file here that names classes and fields of the product.

If one of them is renamed or moved, change its line; the files stay valid, since they hold tags and positions alone.
Never reuse a tag or a position: new ones go to the end. If a class is restructured, give its tag `parts` and `make`
that still take the old positions.
"""

from __future__ import annotations

from math import isfinite
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from farhop_wire import region_pb2

from farhop.balance import machine, outcome
from farhop.balance.health.hot_guard import GuardConfig
from farhop.balance.health.region import LivenessConfig
from farhop.balance.health.replica import HealthConfig
from farhop.balance.model_facts import ModelFacts
from farhop.balance.model_steps import ModelStep
from farhop.store.documents.report import ModelReport, RegionReport
from farhop_lab.histories.codec import Tag
from global_lb.fleet import view as global_view
from global_lb.fleet.regions import Spill
from global_lb.fleet.table import Price
from global_lb.links.prefix_streams import Prefixes, PrefixGapError
from global_lb.routing import flow as global_flow
from global_lb.routing import policy as global_policy
from global_lb.routing.flow import FlowConfig as GlobalFlowConfig
from global_lb.routing.flow import GlobalFlow
from global_lb.routing.pick import Decision
from global_lb.routing.policy import RouteConfig
from global_lb.routing.routes import Routes, RoutesChanged
from regional_lb.fleet import kv_events, recent, shares
from regional_lb.fleet import view as regional_view
from regional_lb.mesh.report import Reporter
from regional_lb.scheduler import admission, overdue, queue, refusals, split
from regional_lb.scheduler import flow as regional_flow
from regional_lb.scheduler import policy as regional_policy
from regional_lb.scheduler.pick import Pick
from topology import model as world
from topology.law import Law

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GLOBAL, REGIONAL = "global", "regional"
Flow = GlobalFlow | regional_flow.RegionalFlow
KnownPrefixes: TypeAlias = Prefixes
RegionReporter: TypeAlias = Reporter
Gap = PrefixGapError


def _fields(kind: type[Any], names: str = "", *, shared: bool = False) -> tuple[type[Any], Tag]:
    """A type whose parts are these attributes, and which is made from them by name."""
    fields = tuple(names.split())
    get = attrgetter(*fields) if len(fields) > 1 else None  # attrgetter of one name gives no tuple

    def parts(value: Any) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in fields) if get is None else get(value)

    return kind, Tag(fields, parts, lambda *values: kind(**dict(zip(fields, values, strict=False))), shared)


def reasons_of(reasons: Any) -> tuple[Any, ...] | None:
    """What must not change unnoticed in a tier's decision: the choice, its score, the number of candidates, and all
    their scores (as one sum). The decision's type may change.
    """
    chosen: Any
    rest: tuple[Any, ...]
    if isinstance(reasons, Decision):
        chosen, scores = reasons.chosen, [one.score for one in reasons.scored]
        who = None if chosen is None else chosen.region
        rest = (sorted(reasons.ties), reasons.spilled_from)
    elif isinstance(reasons, Pick):
        chosen, scores = reasons.chosen, [one.score for one in reasons.ranked]
        who = None if chosen is None else chosen.replica
        rest = (reasons.deferred_to is not None, reasons.explored, reasons.version)
    else:
        return None
    return who, None if chosen is None else chosen.score, len(scores), sum(s for s in scores if isfinite(s)), rest


def _delta_parts(delta: Any) -> tuple[Any, ...]:
    slice_ = delta.slice if delta.HasField("slice") else None
    slice_parts = None
    if slice_ is not None:
        paths = tuple((path.parent, tuple(path.nodes)) for path in slice_.paths)
        slice_parts = slice_.snapshot_id, slice_.slice, slice_.last, paths
    return delta.instance, delta.incarnation, delta.seq, delta.after, slice_parts, tuple(map(_change, delta.changes))


def _change(change: Any) -> tuple[Any, ...]:
    what = change.WhichOneof("what")
    if what == "stored":
        return 0, change.stored.parent, tuple(change.stored.nodes)
    return (1, tuple(change.evicted.nodes)) if what == "evicted" else (2,)


def _delta(
    instance: str, incarnation: int, seq: int, after: int, slice_parts: tuple[Any, ...] | None, changes: tuple[Any, ...]
) -> Any:
    delta = region_pb2.PrefixDelta(instance=instance, incarnation=incarnation, seq=seq, after=after)
    if slice_parts is not None:
        paths = [region_pb2.PrefixPath(parent=parent, nodes=nodes) for parent, nodes in slice_parts[3]]
        slice_ = region_pb2.PrefixSlice(
            snapshot_id=slice_parts[0], slice=slice_parts[1], last=slice_parts[2], paths=paths
        )
        delta.slice.CopyFrom(slice_)
    for what, *of in changes:
        one = delta.changes.add()
        if what == 0:
            one.stored.parent = of[0]
            one.stored.nodes.extend(of[1])
        elif what == 1:
            one.evicted.nodes.extend(of[0])
        else:
            one.cleared.SetInParent()
    return delta


QUEUE = ("requests_max", "tokens_max", "wait_s", "stands_s", "late_s", "starvation_s")


def _queue(figures: tuple[Any, ...]) -> queue.QueueConfig:
    """`late_s` follows from the configured objective."""
    said = dict(zip(QUEUE, figures, strict=True))
    return queue.QueueConfig(ttft_objective_s=said.pop("late_s") / queue.LATE_SHARE, **said)


def _regional_config(region: str, instance: str, *parts: Any) -> regional_flow.FlowConfig:
    figures, (health, foreign, *more) = parts[: len(QUEUE)], parts[len(QUEUE) :]
    return regional_flow.FlowConfig(
        region, instance, _queue(figures), health, foreign, **dict(zip(("move_over_s",), more, strict=False))
    )


def _given(config: split.SplitConfig) -> dict[str, Any]:
    """The fields of one model's split that are set."""
    return {name: getattr(config, name) for name in config.model_fields_set}


def _splits(given: Any) -> dict[str, split.SplitConfig]:
    return {model: split.SplitConfig(**fields) for model, fields in given.items()}


def _rule(version: str, mark: machine.HeaderMatch | None, tenant: str) -> split.RuleConfig:
    looks_at = {} if mark is None else {mark.kind: {"name": mark.name, "value": mark.value}}
    return split.RuleConfig.model_validate({"version": version, "tenant": tenant, **looks_at})


class _Capacity(ModelReport, frozen=True):
    pass


_CAPACITY = (
    "wait_ms", "prefill_ms_per_token", "tpot_ms", "bytes_per_token", "replicas_ready", "slots_free", "slots_total",
    "used_share", "headroom_foreign_tokens", "usable_share", "batch_interference_ms", "queued_requests",
    "queued_tokens",
)  # fmt: skip
_ROUTE = (
    "policy", "weights", "regions", "fill_at", "prefix_bytes", "bias_ms", "foreign_quota", "affinity_ms", "canary",
    "canary_by", "egress_usd_per_hour", "usd_weight_ms", "answer", "redirect_bytes", "advise", "unicast_tokens",
    "models",
)  # fmt: skip

_FORWARD = (
    "id", "attempt", "target", "address", "promised_ttft_ms", "lawful", "prefill", "waited_s", "reasons",
    "first_token_by", "longer",
)  # fmt: skip

_KINDS: dict[int, tuple[type[Any], Tag]] = {
    # events and commands of both tiers
    1: _fields(machine.RequestArrived, "request"),
    2: _fields(
        machine.Request,
        "id tenant model prompt_bytes body_bytes chain deadline max_tokens stream priority key entry_region issuer "
        "lawful narrow promised_ttft_ms session version header_matches tokens divisible body_hash waited_s recomputed "
        "soft_session parent_session among once by_anycast first_token_by tools continues alias alias_why answers "
        "fallbacks fallbacks_lawful attempted",
    ),
    3: _fields(machine.AttemptBegan, "id attempt status load"),
    4: _fields(machine.AttemptEnded, "id attempt status usage fault chain answer_bytes whole load"),
    5: _fields(machine.AttemptFailed, "id attempt outcome resumable target_lives carried_by"),
    6: _fields(machine.AttemptRefused, "id attempt outcome wait_ms"),
    7: _fields(machine.ClientLeft, "id"),
    8: _fields(machine.TimerFired, "id"),
    9: _fields(machine.PrefillEnded, "id attempt"),
    10: _fields(machine.PrefillFailed, "id attempt outcome"),
    11: _fields(machine.LawChanged, "law"),
    12: _fields(machine.Usage, "prompt_tokens completion_tokens cached_tokens reasoning_tokens"),
    13: _fields(machine.HeaderMatch, "kind name value"),
    14: _fields(machine.Tokens, "ids cache_salt shape whole"),
    15: _fields(machine.Address, "host port via tls"),
    16: (outcome.Outcome, Tag(("reason",), lambda it: (it.reason,), outcome.by_reason)),
    17: _fields(machine.Prefill, "target address bootstrap_port room"),
    18: _fields(machine.PromptTokenized, "id tokens"),
    20: (
        machine.Forward,
        Tag(
            _FORWARD,
            lambda it: (
                it.id,
                it.attempt,
                it.target,
                it.address,
                it.promised_ttft_ms,
                it.lawful,
                it.prefill,
                it.waited_s,
                reasons_of(it.reasons),
                it.first_token_by,
                it.longer,
            ),
            lambda *_: None,  # commands are compared, not made
        ),
    ),
    21: _fields(machine.Hold, "id"),
    22: (
        machine.Answer,
        Tag(
            ("id", "outcome", "detail", "retry_after_s", "wait_ms", "reasons"),
            lambda it: (it.id, it.outcome, it.detail, it.retry_after_s, it.wait_ms, reasons_of(it.reasons)),
            lambda *_: None,
        ),
    ),
    23: _fields(machine.Redirect, "id url outcome forward own"),
    24: _fields(machine.Cancel, "id attempt"),
    25: _fields(machine.SetTimer, "id at"),
    26: _fields(machine.FallBack, "id request"),
    # the law
    30: (Law, Tag(("topology", "lineage"), lambda it: (it.topology, it.lineage), Law, shared=True)),
    31: _fields(world.Topology, "name epoch regions tenants models hubs rtt places local_rtt_ms", shared=True),
    32: _fields(
        world.Region,
        "name city country jurisdictions latitude longitude entry hub egress_usd_per_gb usd_per_gpu_hour",
    ),
    33: _fields(world.Tenant, "name keys residency priority weight share_prefixes models tiers objectives resume"),
    34: _fields(world.Key, "name sha256 within"),
    35: _fields(world.Residency, "processing entry logging hints on_exhausted wait_max_s"),
    36: _fields(world.Rule, "allow deny"),
    37: _fields(world.Place, "name kind within"),
    # events of the regional tier
    50: (
        regional_view.ViewSwapped,
        Tag(
            ("replicas",),
            lambda it: (tuple(it.view.replicas.values()),),
            lambda replicas: regional_view.ViewSwapped(regional_view.view_of(list(replicas))),
        ),
    ),
    51: _fields(
        regional_view.Replica,
        "name address models gpu slots kv_tokens prefill_tokens_max prefill_ms_per_token tpot_ms draining missing "
        "kv_ranks adapters sample version role handover bootstrap_port lineage facts token_ids writes_on",
    ),
    52: _fields(
        regional_view.Sample,
        "at waiting running kv_usage kv_tokens prefix_queries prefix_hits lora queued started_at slots since asleep",
    ),
    53: _fields(regional_view.Lora, "max running waiting"),
    54: _fields(regional_view.ReplicaSampled, "target sample"),
    55: _fields(regional_view.ReplicaProbed, "target ok fault ready strain"),
    56: _fields(regional_view.BlocksChanged, "target rank changes"),
    57: _fields(kv_events.Stored, "hashes parent tokens block_tokens adapter extras group"),
    58: _fields(kv_events.Removed, "hashes group"),
    59: _fields(kv_events.Cleared),
    60: _fields(kv_events.Lost, "all"),
    61: _fields(kv_events.Linked, "up"),
    62: _fields(shares.PeerReported, "peer loads queued whole cached epoch"),
    63: _fields(shares.PeerLoad, "address in_flight prefill_tokens kv_tokens taken known"),
    64: _fields(recent.Cached, "replica chain audience own"),
    65: _fields(shares.PeersChanged, "live speaking serving"),
    66: _fields(shares.TurnTimerFired),
    67: _fields(regional_policy.PoliciesChanged, "choices"),
    68: (
        regional_policy.PolicyConfig,
        Tag(
            ("name", "load_factor", "prefix_bytes", "weights"),
            attrgetter("name", "load_factor", "prefix_bytes", "weights"),
            lambda name, load_factor, prefix_bytes, weights: regional_policy.PolicyConfig.model_construct(
                name=name, load_factor=load_factor, prefix_bytes=prefix_bytes, weights=weights
            ),
        ),
    ),
    69: (
        split.SplitsChanged,
        Tag(
            ("splits",),
            lambda it: ({model: _given(config) for model, config in it.splits.items()},),
            lambda splits: split.SplitsChanged(_splits(splits)),
        ),
    ),
    70: (
        split.RuleConfig,
        Tag(("version", "mark", "tenant"), lambda it: (it.version, it.header_match, it.tenant), _rule),
    ),
    71: (
        regional_flow.FlowConfig,
        Tag(
            ("region", "instance", *(f"queue_{name}" for name in QUEUE), "health", "foreign", "move_over_s"),
            lambda it: (
                it.region,
                it.instance,
                *(getattr(it.queue, name) for name in QUEUE),
                it.health,
                it.foreign,
                it.move_over_s,
            ),
            _regional_config,
        ),
    ),
    115: _fields(refusals.RefusalsChanged, "by_model"),
    116: _fields(refusals.OrderedRefusal, "share until why author"),
    117: _fields(overdue.OverdueCheckDue),
    72: _fields(
        HealthConfig,
        "rise fall streak eject_s refused_s trial_s fresh_s slow_start_s eject_share_max panic_share outlier_factor",
    ),
    73: _fields(admission.ForeignConfig, "reserve_share last_resort_reserve_share promise_factor promise_slack_ms"),
    74: _fields(
        ModelReport,
        "model replicas_ready replicas_total slots_total slots_free kv_tokens_total kv_tokens_free wait_ms "
        "prefill_ms_per_token tpot_ms bytes_per_token version in_flight queued_requests queued_tokens usable_share "
        "headroom_foreign_tokens used_share batch_interference_ms base_unknown gpu_types bases max_model_len root "
        "parent context_tokens foreign_wait_ms",
    ),
    # events of the global tier
    90: (
        global_view.ViewSwapped,
        Tag(
            ("regions",),
            lambda it: (tuple(it.view.regions.values()),),
            lambda regions: global_view.ViewSwapped(global_view.View({region.name: region for region in regions})),
        ),
    ),
    91: _fields(global_view.Region, "name rtt_ms instances", shared=True),
    92: _fields(
        global_view.Instance,
        "name region tier incarnation received_at clock_offset_ms draining accepted models client_url lineage "
        "hop_version",
        shared=True,
    ),
    # Recorded when an instance had only these fields of a ModelReport (74).
    93: (
        _Capacity,
        Tag(
            _CAPACITY,
            attrgetter(*_CAPACITY),
            lambda *values: _Capacity(
                model="",
                replicas_total=0,
                kv_tokens_total=0,
                kv_tokens_free=0,
                **dict(zip(_CAPACITY, values, strict=True)),
            ),
        ),
    ),
    94: _fields(global_view.RegionKnown, "region known"),
    95: _fields(global_view.RegionReported, "region renewed known"),
    96: _fields(global_view.ChannelChanged, "region up known"),
    97: _fields(global_view.RegionForced, "region drain why until over_s keep_share moves"),
    114: _fields(global_view.OutputsReported, "outputs"),
    98: _fields(RoutesChanged, "routes"),
    99: (
        RouteConfig,
        Tag(
            _ROUTE,
            attrgetter(*_ROUTE),
            # Unchecked: a history has options with policies that do not read them.
            lambda *values: RouteConfig.model_construct(**dict(zip(_ROUTE, values, strict=False))),
        ),
    ),
    100: _fields(global_policy.OverridesChanged, "overrides"),
    101: _fields(global_policy.OperatorOverrides, "biases pins"),
    102: _fields(global_policy.Bias, "region ms why author until"),
    103: _fields(global_policy.Pin, "region strict why author until"),
    104: _fields(Price, "usd_per_gpu_hour egress_usd_per_gb"),
    105: _fields(GlobalFlowConfig, "region trie_bytes held_max liveness spill https_only unicast_url"),
    106: _fields(LivenessConfig, "report_age_s relay_streak relay_hold_s"),
    107: (
        Spill,
        Tag(
            ("guard", "penalty_ms"),
            lambda it: (it.guard, it.penalty_ms),
            lambda guard, penalty_ms: Spill(
                at=guard.spill_at,
                return_at=guard.return_at,
                hold_s=guard.hold_s,
                ramp_per_s=guard.ramp_per_s,
                penalty_ms=penalty_ms,
            ),
        ),
    ),
    108: _fields(GuardConfig, "spill_at return_at hold_s ramp_per_s"),
    109: (
        region_pb2.PrefixDelta,
        Tag(
            ("instance", "incarnation", "seq", "after", "slice", "changes"),
            _delta_parts,
            _delta,
        ),
    ),
    110: _fields(global_flow.Reconfigured, "law config routes prices"),
    111: (
        regional_flow.Reconfigured,
        Tag(
            ("law", "config", "policies", "splits"),
            lambda it: (it.law, it.config, it.policies, {model: _given(config) for model, config in it.splits.items()}),
            lambda law, config, policies, splits: regional_flow.Reconfigured(law, config, policies, _splits(splits)),
        ),
    ),
    112: _fields(machine.AttemptMoved, "id attempt target passed"),
    113: _fields(machine.Move, "id attempt"),
    118: _fields(machine.Recall, "id attempt"),
    119: _fields(machine.EngineLoad, "waiting running kv_usage"),
    120: _fields(ModelFacts, "max_model_len root parent"),
    121: _fields(ModelStep, "model prompt_bytes_max tools usd_max weight"),
}

NOT_KEPT: dict[str, str] = {
    "Outcome": "source retryable",  # follow from the reason
    "FallBack": "reasons",  # those of the Forward or the Answer before it
    "Topology": "entries",  # the drivers check who may enter where
    "Key": "explain",  # and what a key may learn of a decision
    "RuleConfig": "header cookie",  # kept as the mark that they make
    "FlowConfig": "queue scaling scalings pilots",  # its figures are kept; scaling asks for replicas, and moves nothing
    "ModelReport": "load_replicas replicas_needed replicas_min replicas_max",  # of scaling, too
    "PeerReported": "learned",  # what a starting balancer is sent once
    "RouteConfig": "tenant model keep_answers_s coalesce",  # where it holds; the drivers' caches
    "Spill": "at return_at hold_s ramp_per_s",  # kept as its guard
    "ViewSwapped": "view",  # kept as its replicas or regions
}
"""By type, the fields that are in no history. All others of a tagged type are."""

TAGS: dict[int, Tag] = {number: tag for number, (_, tag) in _KINDS.items()}
KINDS = tuple(kind for kind, _ in _KINDS.values())
NAMES: dict[int, str] = {number: kind.__name__ for number, (kind, _) in _KINDS.items()}
_TAG_OF: dict[type[Any], int] = {kind: number for number, (kind, _) in _KINDS.items()}


def tag_of(value: Any) -> int:
    """Its tag, or that of its base class. TypeError if there is none."""
    kind = type(value)
    number = _TAG_OF.get(kind)
    if number is None:
        number = next((_TAG_OF[base] for base in kind.__mro__ if base in _TAG_OF), None)
        if number is None:
            raise TypeError(f"{kind.__name__} has no tag: give it one in farhop_lab.histories.names")
        _TAG_OF[kind] = number
    return number


# -- machines, and their inputs besides events


def made(genesis: tuple[Any, ...]) -> Flow:
    """A machine in its initial state. A tenant's weight and patience are those of the law in force, as in both mains,
    unless a test had one for all.
    """
    tier, config, law, seed, chosen, more, *rest = genesis
    for_all = rest[0] if rest else None
    if tier == GLOBAL:
        routes = Routes(chosen) if chosen else None

        def patience_s(tenant: str) -> float:
            return of_world.law.patience_s(tenant) if for_all is None else for_all

        of_world = GlobalFlow(config, law, dice(seed), patience_s, routes, more or None)
        return of_world

    def weight(tenant: str) -> float:
        known = of_region.law.topology.tenants.get(tenant)
        of_law = known.weight if known is not None else 1.0
        return of_law if for_all is None else for_all

    policies = regional_policy.Policies(chosen) if chosen else None
    splits = split.Splits(_splits(more)) if more else None
    of_region = regional_flow.RegionalFlow(config, law, dice(seed), weight, policies, splits)
    return of_region


MACHINES: tuple[Any, ...] = (GlobalFlow, regional_flow.RegionalFlow)


def dice(seed: str) -> Random:
    """The random generators that `made` gives a machine of this seed."""
    return Random(seed)


def as_it_began(
    flow: Any, config: Any, law: Law, seed: str, of_tenant: Any, chosen: Any = None, more: Any = None
) -> tuple[Any, ...]:
    """The genesis of a machine made from these arguments of its constructor. For recording alone: it reads private
    configuration. To be called while the machine is being made: a main's `of_tenant` has no answers yet.
    """
    try:
        for_all = float(of_tenant(""))
    except (AttributeError, NameError):
        for_all = None
    configured = dict(chosen._configured) if chosen is not None else {}
    if is_global(flow):
        return GLOBAL, config, law, seed, configured, dict(more or {}), for_all
    splits = {model: _given(config) for model, config in more._configured.items()} if more is not None else {}
    return REGIONAL, config, law, seed, configured, splits, for_all


# What is done to a machine, by the numbers in the files.
HANDLE, BEGIN, TAKE, ENDED, TIDY, ADOPT, STEP, REPORT, CONSIDER = range(9)
CALLS = ("handle", "begin", "take", "ended", "tidy", "adopt", "step", "report", "consider")
GOES_ON, DONE, GAP = range(3)  # results of a step


class Rig:
    """One machine and its process's other parts: the prefix streams of a global balancer, which write to its trie, and
    the reports of a regional one, which read it.
    """

    def __init__(self, genesis: tuple[Any, ...]) -> None:
        self.flow = made(genesis)
        self._now = 0.0
        self._streams: list[Any] = []
        self._work: list[Iterator[None]] = []
        self._calls: tuple[Callable[..., Any], ...] = (
            self._handle, self._begin, self._take, self._ended, self._tidy, self._adopt, self._step, self._report,
            self._consider,
        )  # fmt: skip
        if isinstance(self.flow, GlobalFlow):
            self._prefixes = Prefixes(self.flow.regions.trie, lambda _reason: None, self.flow.law.epoch)
            self.flow.regions.sent.append(self._prefixes.sent)
            self.flow.forgotten.append(self._prefixes.begin_anew)
        else:
            config = self.flow.config
            self._reporter = Reporter(
                self.flow,
                region=config.region,
                instance="a",
                addresses=("", "", ""),
                clock=lambda: self._now,
                incarnation=1,
            )

    def do(self, call: int, now: float, of: Any) -> Any:
        """Carry out one of CALLS; returns its result."""
        self._now = now
        return self._calls[call](of)

    def _handle(self, event: Any) -> Any:
        return self.flow.handle(event, self._now)

    def _begin(self, name: tuple[str, str]) -> Any:
        stream = self._prefixes.begin(name)
        self._streams.append(stream)
        return stream.known_incarnation, stream.known_seq

    def _take(self, of: tuple[int, Any]) -> None:
        self._work.append(self._streams[of[0]].take(of[1]))

    def _ended(self, number: int) -> None:
        self._streams[number].ended(self._now)

    def _tidy(self, _of: None) -> None:
        self._work.append(self._prefixes.tidy(self._now))

    def _adopt(self, epoch: int) -> None:
        self._prefixes.adopt(epoch)

    def _step(self, number: int) -> int:
        return step(self._work[number])

    def _report(self, due: bool) -> Any:
        report = self._reporter.build()
        return reported(report) if due else None

    def _consider(self, of: tuple[Any, ...]) -> Any:
        assert isinstance(self.flow, GlobalFlow)
        request, within, without = of
        return reasons_of(self.flow.consider(request, self._now, within, without))


def step(work: Iterator[None]) -> int:
    """One step of work that is done in steps."""
    try:
        next(work)
    except StopIteration:
        return DONE
    except PrefixGapError:
        return GAP
    return GOES_ON


def is_global(flow: Any) -> bool:
    """Whether it is a global balancer's machine."""
    return isinstance(flow, GlobalFlow)


def reported(report: RegionReport) -> Any:
    """What a report says of a region."""
    return report.models, report.accepted_bytes, report.law_epoch


def reading_writes(flow: Any, now: float) -> bool:
    """Whether reading a regional machine now (a report, `explain`) changes its state: a slow start that is due is
    written by the next reader. For recording alone, as it reads private state.
    """
    replicas = flow.replicas
    return bool(now >= replicas._able_until or any(line not in replicas._able for line in replicas.view.by_variant))


def of_region(region: str, law: Law, seed: str) -> tuple[Any, ...]:
    """The genesis of a regional balancer as in the simulator: `Rig` makes the same machine from it. `seed` is that of
    its own random generator.
    """
    return REGIONAL, regional_flow.FlowConfig(region), law, seed, {}, {}


def of_entry(region: str, law: Law, seed: str, report_age_s: float) -> tuple[Any, ...]:
    """The genesis of a global balancer as in the simulator."""
    config = GlobalFlowConfig(region, liveness=LivenessConfig(report_age_s=report_age_s))
    prices = {
        name: Price(of.usd_per_gpu_hour, of.egress_usd_per_gb) for name, of in law.topology.regions.items()
    }  # as in main
    return GLOBAL, config, law, seed, {}, prices


def every_choice() -> list[Any]:
    """Every regional policy, as its balancer is configured."""
    return [
        regional_policy.PoliciesChanged({"": regional_policy.PolicyConfig(name=name)}) for name in regional_policy.KNOWN
    ]


def every_route(regions: list[str]) -> list[Callable[[float], Any]]:
    """Every policy, modifier and override, as a global balancer gets them, by its clock."""
    first, last = regions[0], regions[-1]
    routes: list[dict[str, Any]] = [
        {"policy": name, "weights": {first: 3.0, last: 1.0}, "regions": tuple(regions)} for name in global_policy.KNOWN
    ]
    routes += [
        {"bias_ms": {first: 40.0, last: -40.0}},
        {"foreign_quota": 0.1, "affinity_ms": 100.0},
        {"canary": {last: 0.3}, "canary_by": "tenant"},
        {"egress_usd_per_hour": 0.5, "usd_weight_ms": 1e5},
        {},
    ]

    def routed(fields: dict[str, Any]) -> Callable[[float], Any]:
        route = RouteConfig.model_construct(**fields)
        return lambda _now: RoutesChanged({("", ""): route})

    def pinned(now: float) -> Any:
        pin = global_policy.Pin(last, False, "a test", "nobody", now + 2.0)
        bias = global_policy.Bias(first, 500.0, "a test", "nobody", now + 2.5)
        return global_policy.OverridesChanged(global_policy.OperatorOverrides({first: bias}, {("model", "llama"): pin}))

    def drained(now: float) -> Any:
        return global_view.RegionForced(last, True, "a test", now + 2.0, 1.0)

    return [*map(routed, routes), pinned, drained]
