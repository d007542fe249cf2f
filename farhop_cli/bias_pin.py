"""`farhop bias` and `farhop pin`: change where requests go, for a time.

A pin that the law would override is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.loose_json import as_dict, dicts
from farhop.service.law import effect
from farhop.store.contract import STEER_PREFIX
from farhop.store.documents import overrides as documents
from farhop.store.documents.document import DocumentError
from farhop.store.documents.overrides import BiasOverride, PinOverride
from farhop_cli import leased, setting
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.law import in_force
from farhop_cli.leased import Leased
from farhop_cli.setting import Item, Noun, Setting
from topology.law import Law
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop.store.contract import Store
    from farhop_cli.fleet import Fleet, Status
    from farhop_cli.options import FleetOptions
    from topology.model import Topology

ONE_OF = "give either --tenant or --model"


def set_bias(region: str, ms: float, why: str, by: str | None, length: str, fleet_options: FleetOptions) -> int:
    """Make a region count as worse or better; the exit code."""
    document = BiasOverride(region=region, ms=ms, **leased.authorship(why, by, length))
    value = _encoded(document)
    here = fleet_options.fleet(region)

    async def effects(store: Store) -> Sequence[str]:
        topology = await in_force(store, here.topology)
        return effect.biased(topology, await here.statuses(), region) if topology is not None else ()

    made = Leased(document.key, {"region": region}, value, document.for_s, effects=effects)
    return leased.put(BIAS, here, made, fleet_options)


def unset_bias(region: str, fleet_options: FleetOptions) -> int:
    """Remove the bias; the exit code."""
    return leased.unset(
        BIAS, fleet_options.fleet(region), documents.bias_key(region), {"region": region}, fleet_options
    )


def set_pin(
    region: str,
    tenant: str,
    model: str,
    strict: bool,
    why: str,
    by: str | None,
    length: str,
    fleet_options: FleetOptions,
) -> int:
    """Pin a tenant's or a model's requests to a region; the exit code."""
    authorship = leased.authorship(why, by, length)
    document = PinOverride(region=region, tenant=tenant, model=model, strict=strict, **authorship)
    value = _encoded(document)
    here = fleet_options.fleet(region)

    async def check(store: Store) -> None:
        _lawful(document, await in_force(store, here.topology))
        if not fleet_options.dry_run:  # which reports it for each tenant
            await setting.warn_unserved(here, [model] if model else [])

    async def effects(store: Store) -> Sequence[str]:
        topology = await in_force(store, here.topology)
        if topology is None:
            return ()
        return effect.pinned(topology, await here.statuses(), region, tenant, model, strict=strict)

    made = Leased(document.key, _whom(tenant, model), value, document.for_s, check, effects)
    return leased.put(PIN, here, made, fleet_options)


def unset_pin(tenant: str, model: str, fleet_options: FleetOptions) -> int:
    """Remove the pin; the exit code."""
    if bool(tenant) == bool(model):
        fail(ONE_OF)
    return leased.unset(
        PIN, fleet_options.fleet(), documents.pin_key(tenant, model), _whom(tenant, model), fleet_options
    )


def _encoded(document: BiasOverride | PinOverride) -> bytes:
    try:
        return documents.encode(document)
    except DocumentError as error:
        leased.refused(error, {"tenant": ONE_OF})
        raise


def _lawful(pin: PinOverride, topology: Topology | None) -> None:
    """End the command for a pin that would never have an effect."""
    if topology is None or not pin.tenant:
        return
    if pin.tenant not in topology.tenants:
        fail(f"--tenant: {quoted(pin.tenant)} is no tenant of topology {quoted(topology.name)}")
    clause = Law(topology).verdict(pin.tenant, "").why_not(pin.region)
    if clause is not None:
        fail(f"{pin.region} is not lawful for {pin.tenant} ({clause}); a pin cannot change that", NEGATIVE)


def _whom(tenant: str, model: str) -> dict[str, str]:
    return {"tenant": tenant} if tenant else {"model": model}


def _read(_key: str, document: bytes) -> Setting:
    one = documents.decode_routing(document)
    if isinstance(one, BiasOverride):
        item = Item({"region": one.region}, {"ms": one.ms})
    else:
        item = Item(_whom(one.tenant, one.model), {"region": one.region, "strict": one.strict})
    return Setting((item,), one.author, one.why, one.at, one.until)


def _bias_line(value: Any) -> str:
    ms = as_dict(value).get("ms", 0.0)
    return f"counts as {abs(ms):g} ms {'worse' if ms >= 0 else 'better'} than it is"


def _pin_line(value: Any) -> str:
    named = as_dict(value)
    return f"to {named.get('region')}, {'and nowhere else' if named.get('strict') else 'while it serves'}"


async def _followed(here: Fleet, _region: str, before: Setting | None, after: Setting | None) -> int:
    one = after or before
    if one is None or not one.items:
        return len(here.admins)  # no balancer followed a document that cannot be read
    return sum(_follows(status, one) is (after is not None) for status in await here.statuses())


def _follows(status: Status, one: Setting) -> bool:
    (item,) = one.items
    region = item.whom.get("region") or item.value["region"]
    own = {"region": region, "author": one.author, "why": one.why}
    return any(
        all(shown.get(name) == value for name, value in own.items())
        for shown in dicts(status.get("operator_overrides"))
    )


BIAS = Noun("bias", f"{STEER_PREFIX}bias/", "no region is biased", _read, _bias_line, leased.all_balancers, _followed)
PIN = Noun("pin", f"{STEER_PREFIX}pin/", "nothing is pinned", _read, _pin_line, leased.all_balancers, _followed)
