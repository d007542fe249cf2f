"""What breaks when, in which world: drawn from a seed, written to a file and read back.

Pure. Invariants: at most AT_ONCE faults at one time, and no two of one kind or of one engine's `/lab/fault` at one
place; the same seed always draws the same schedule; an invalid schedule is refused with the field's name.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import yaml

from farhop_lab.engine.core.faults import KINDS as ENGINE_KINDS
from farhop_lab.sim.faults import KINDS, LINK_KINDS, REGION_KINDS, REPLICA_KINDS, WORLD_KINDS, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable

REGIONS = ("ash", "elm", "oak", "yew")
WARM_S = 8.0  # before the first fault: a world that has served some 8 requests at every replica
SPAN_S = 20.0  # within which faults begin
LONGEST_S = 12.0
FAULTS_MAX = 6
AT_ONCE = 3
DOCUMENT_BYTES_MAX = 64 * 1024


class ScheduleError(ValueError):
    """A schedule that cannot be run; the text names the field and the remedy."""


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A world of `regions` times `replicas` GPUs, the seed of its clients' requests, and its faults in order of time.
    `about` says what it once showed.
    """

    seed: int
    regions: int = 2
    replicas: int = 2
    faults: tuple[Fault, ...] = ()
    about: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its regions."""
        return REGIONS[: self.regions]

    @property
    def mended_s(self) -> float:
        """When the last fault ends; WARM_S if there is none."""
        return max((fault.until_s for fault in self.faults), default=WARM_S)


def drawn(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = Random(f"chaos {seed}")
    regions, replicas = rng.choice(((2, 2), (2, 3), (3, 2)))
    faults: list[Fault] = []
    for _ in range(rng.randint(1, FAULTS_MAX)):
        fault = _fault(rng, REGIONS[:regions], replicas)
        if fits(fault, faults):
            faults.append(fault)
    return Schedule(seed, regions, replicas, in_order(faults))


def _fault(rng: Random, regions: tuple[str, ...], replicas: int) -> Fault:
    # Half of all faults are a replica's, as there are most of them.
    kinds = rng.choices((REPLICA_KINDS, REGION_KINDS, WORLD_KINDS), (5, 3, 2))[0]
    what, region = rng.choice(kinds), rng.choice(regions)
    at_s, for_s = WARM_S + round(rng.uniform(0.0, SPAN_S), 1), round(0.3 + LONGEST_S * rng.random() ** 2, 1)
    fault = Fault(at_s, for_s, what, region)
    replace = msgspec.structs.replace
    if what in REPLICA_KINDS:
        fault = replace(fault, replica=f"gpu-{rng.randrange(replicas)}")
    if what == "slow":
        fault = replace(fault, factor=round(rng.uniform(1.5, 12.0), 1))
    elif what == "lose-reports":
        fault = replace(fault, factor=rng.choice((0.5, 0.9, 1.0)))
    elif what in LINK_KINDS:
        fault = replace(fault, to=rng.choice([name for name in regions if name != region]))
    elif what == "etcd":
        fault = replace(fault, region="")
    return fault


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """In order of their beginning."""
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.what, fault.region, fault.replica)))


def fits(fault: Fault, others: list[Fault]) -> bool:
    """Whether it may overlap with these: not too many at once, and each mended by its own end alone."""
    beside = [one for one in others if one.at_s < fault.until_s and fault.at_s < one.until_s]
    begins = [fault.at_s, *(one.at_s for one in beside if one.at_s >= fault.at_s)]
    most = max(1 + sum(one.at_s <= at < one.until_s for one in beside) for at in begins)
    return most <= AT_ONCE and not any(_same_place(fault, one) for one in beside)


def _same_place(a: Fault, b: Fault) -> bool:
    """Whether mending one would mend the other."""
    if a.what in ENGINE_KINDS and b.what in ENGINE_KINDS:
        return (a.region, a.replica) == (b.region, b.replica)
    if a.what in LINK_KINDS and b.what in LINK_KINDS:
        return {a.region, a.to} == {b.region, b.to}
    if {a.what, b.what} <= {"kill", "restart-regional"}:
        return a.region == b.region
    if a.what == "law" == b.what:
        return True  # each writes the whole law
    return (a.what, a.region, a.replica) == (b.what, b.region, b.replica)


# -- files


def encode(schedule: Schedule) -> str:
    """The schedule as YAML, one fault a line."""
    document = msgspec.to_builtins(schedule)
    faults = document.pop("faults", [])
    lines = [yaml.safe_dump(document, sort_keys=False, width=118).rstrip(), "faults:" if faults else "faults: []"]
    lines += [
        f"  - {yaml.safe_dump(fault, default_flow_style=True, sort_keys=False, width=10_000).strip()}"
        for fault in faults
    ]
    return "\n".join(lines) + "\n"


def decode(text: str, source: str = "schedule") -> Schedule:
    """A schedule from YAML or JSON. ScheduleError."""
    if len(text.encode()) > DOCUMENT_BYTES_MAX:
        raise ScheduleError(f"{source}: more than {DOCUMENT_BYTES_MAX} bytes; shorten it")
    try:
        schedule = msgspec.convert(yaml.safe_load(text), Schedule, strict=False)
    except yaml.YAMLError as error:
        raise ScheduleError(f"{source}: no YAML: {' '.join(str(error).split())}") from None
    except msgspec.ValidationError as error:
        raise ScheduleError(f"{source}: {error}") from None
    check(schedule, source)
    return schedule


def check(schedule: Schedule, source: str = "schedule") -> None:
    """ScheduleError for a schedule that cannot be run."""
    if not 2 <= schedule.regions <= len(REGIONS):
        raise ScheduleError(f"{source}: regions: give 2 to {len(REGIONS)}, not {schedule.regions}")
    if not 2 <= schedule.replicas <= 16:
        raise ScheduleError(f"{source}: replicas: give 2 to 16, not {schedule.replicas}")
    if len(schedule.faults) > 100:
        raise ScheduleError(f"{source}: faults: give at most 100")
    for place, fault in enumerate(schedule.faults):
        if wrong := _wrong(fault, schedule):
            raise ScheduleError(f"{source}: faults[{place}].{wrong}")


def _wrong(fault: Fault, schedule: Schedule) -> str:
    replicas = [f"gpu-{n}" for n in range(schedule.replicas)]
    if fault.what not in KINDS:
        return f"what: {fault.what!r} is none of {', '.join(KINDS)}"
    if not 0.0 <= fault.at_s <= 3600.0:
        return "at_s: give 0 to 3600 seconds"
    if not 0.0 < fault.for_s <= 3600.0:
        return "for_s: give more than 0 and at most 3600 seconds"
    if fault.what != "etcd" and fault.region not in schedule.names:
        return f"region: {fault.region!r} is none of {', '.join(schedule.names)}"
    if fault.what in REPLICA_KINDS and fault.replica not in replicas:
        return f"replica: {fault.replica!r} is none of {', '.join(replicas)}"
    if fault.what in LINK_KINDS and fault.to not in [name for name in schedule.names if name != fault.region]:
        return f"to: name another region than {fault.region}"
    if fault.what == "slow" and not 1.0 <= fault.factor <= 1e6:
        return "factor: give 1 to 1,000,000 times slower"
    if fault.what == "lose-reports" and not 0.0 <= fault.factor <= 1.0:
        return "factor: give a share from 0 to 1"
    return ""
