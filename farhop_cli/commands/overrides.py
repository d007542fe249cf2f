"""What operators set in etcd, for a while or until unset: `drain`, `bias`, `pin`, `route`, `policy`, `split`.

Only declares the commands: the modules beside this folder do the work.
"""

from __future__ import annotations

from typing import Annotated

import typer

from farhop_cli.commands.wiring import DrainedRegion, Model, Region, Tenant, group, noun, verb
from farhop_cli.exits import fail
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN, By, FleetOptions, Length, Why

# -- drain

drain_app = group(
    "drain", "Move a region's new work, or an entry's clients, elsewhere.", 'set tokyo --for 30m --why "new kernel"'
)
DrainedEntry = Annotated[str, typer.Option("--entry", metavar="NAME", help="Drain this entry instead of a region.")]


@verb(drain_app, "set", 'farhop drain set tokyo --for 30m --why "kernel update"', writes=True)
def drain_set(
    why: Why,
    region: DrainedRegion = "",
    entry: DrainedEntry = "",
    length: Length = "1h",
    over: Annotated[
        str, typer.Option("--over", metavar="DURATION", help="How long it takes to move new work away. 0s: at once.")
    ] = "10s",
    by: By = None,
    force: Annotated[bool, typer.Option("--force", help="Drain it even if it is the last region of a tenant.")] = False,
    move_streams: Annotated[
        bool, typer.Option("--move-streams", help="Move streams under way, too, in the same time.")
    ] = False,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Drain a region or, with --entry, an entry. It ends by itself.

    A region's new work goes elsewhere; an entry's new clients do: `farhop dns` leaves it out, and `farhop anycast`
    drains and withdraws its routes. Exit code 1 if it is refused, since a tenant would have no region left.
    """
    from farhop_cli.drain import put, put_entry

    _one_of(region, entry)
    if entry:
        if move_streams:
            fail("--move-streams: is of a region; an entry's clients stay until they leave")
        return put_entry(entry, why, by, length, over, fleet_options)
    return put(region, why, by, length, over, force, move_streams, fleet_options)


@verb(drain_app, "unset", "farhop drain unset tokyo", writes=True)
def drain_unset(region: DrainedRegion = "", entry: DrainedEntry = "", *, fleet_options: FleetOptions) -> int:
    """End a drain; the region takes its work back gradually.

    Tells who had set it and why. Exit code 1 if it is not drained. `farhop undrain` is the same.
    """
    from farhop_cli.drain import unset, unset_entry

    _one_of(region, entry)
    return unset_entry(entry, fleet_options) if entry else unset(region, fleet_options)


def _one_of(region: str, entry: str) -> None:
    if bool(region) == bool(entry):
        fail("give either a region or --entry NAME")


undrain_app = App(**PLAIN)
verb(undrain_app, "undrain", "farhop undrain tokyo", writes=True)(drain_unset)


# -- bias

bias_app = group(
    "bias", "Draw requests to a region, or away from it, for a while.", 'set tokyo --ms 50 --for 2h --why "dear link"'
)


@verb(bias_app, "set", 'farhop bias set tokyo --ms 50 --for 2h --why "link is dear tonight"', writes=True)
def bias_set(
    region: Region,
    ms: Annotated[
        float, typer.Option("--ms", metavar="MS", help="Milliseconds added to its scores; below 0: subtracted.")
    ],
    why: Why,
    length: Length = "1h",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Make a region count as better or worse than it is.

    Ends by itself, as a drain does. It acts where scores are milliseconds (docs/reference/policies.md).
    """
    from farhop_cli.bias_pin import set_bias

    return set_bias(region, ms, why, by, length, fleet_options)


@verb(bias_app, "unset", "farhop bias unset tokyo", writes=True)
def bias_unset(region: Region, *, fleet_options: FleetOptions) -> int:
    """End a bias. Exit code 1 if there is none."""
    from farhop_cli.bias_pin import unset_bias

    return unset_bias(region, fleet_options)


# -- pin

pin_app = group(
    "pin", "Send a tenant's or a model's requests to one region, for a while.",
    'set frankfurt --tenant eu-only --for 1h --why "new GPUs"', "frankfurt",
)  # fmt: skip


@verb(pin_app, "set", 'farhop pin set frankfurt --tenant eu-only --for 1h --why "new GPUs"', writes=True)
def pin_set(
    region: Region,
    why: Why,
    tenant: Tenant = "",
    model: Model = "",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse requests while the region does not serve.")] = False,
    length: Length = "1h",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Pin a tenant's or a model's requests to a region.

    Ends by itself, as a drain does. While the region does not serve, requests go elsewhere. It never widens the law.
    """
    from farhop_cli.bias_pin import set_pin

    return set_pin(region, tenant, model, strict, why, by, length, fleet_options)


@verb(pin_app, "unset", "farhop pin unset --tenant eu-only", writes=True)
def pin_unset(tenant: Tenant = "", model: Model = "", *, fleet_options: FleetOptions) -> int:
    """End a pin. Exit code 1 if there is none."""
    from farhop_cli.bias_pin import unset_pin

    return unset_pin(tenant, model, fleet_options)


# -- route

route_app = group(
    "route", "How an entry chooses regions and answers; overrides its configuration.",
    "set virginia '{answer: redirect}' --tenant acme --why \"streams are long\"", "virginia",
)  # fmt: skip

RoutedModel = Annotated[
    str, typer.Option("--model", help="Only requests for this model (with --tenant: of that tenant).")
]


@verb(
    route_app, "set", "farhop route set virginia '{answer: redirect}' --tenant acme --why \"long streams\"", writes=True
)
def route_set(
    region: Annotated[str, typer.Argument(help="The entry's region, whose global balancers follow it.")],
    route: Annotated[str, typer.Argument(help="YAML or JSON, with the fields of `routes[]` in a configuration.")],
    why: Why,
    tenant: Tenant = "",
    model: RoutedModel = "",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Set how an entry chooses regions and answers.

    Without --tenant and --model it is for all requests without a route of their own. Exit code 1 if somebody else
    changed it meanwhile, or the routes contradict one another.
    """
    from farhop_cli.route import put

    return put(region, route, tenant, model, why, by, fleet_options)


@verb(route_app, "unset", "farhop route unset virginia --tenant acme", writes=True)
def route_unset(
    region: Annotated[str, typer.Argument(help="The entry's region.")],
    tenant: Tenant = "",
    model: RoutedModel = "",
    why: Why = "back to the configuration",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Go back to the configuration.

    Without --tenant and --model, for all. Exit code 1 if nothing is set.
    """
    from farhop_cli.route import unset

    return unset(region, tenant, model, why, by, fleet_options)


# -- policy, split

policy_app = group(
    "policy", "The policy by which a region picks replicas; overrides its configuration.",
    'set tokyo least-load --why "comparing"',
)  # fmt: skip
OfModel = Annotated[
    str | None,
    typer.Option("--model", help="What is set for this model; '': for all other models. Default: everything."),
]


@verb(policy_app, "set", 'farhop policy set tokyo least-load --why "comparing"', writes=True)
def policy_set(
    region: Annotated[str, typer.Argument(help="The region whose balancers follow it.")],
    policy: Annotated[str, typer.Argument(help="A regional policy, such as predictive or least-load.")],
    why: Why,
    model: Annotated[
        str, typer.Option("--model", help="Only for this model. Default: all models without their own.")
    ] = "",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Set the policy by which a region picks replicas.

    Exit code 1 if somebody else changed it meanwhile.
    """
    from farhop_cli.by_model import set_policy

    return set_policy(region, policy, model, why, by, fleet_options)


split_app = group(
    "split", "What share of a model's traffic each version gets in a region.",
    'set tokyo --model llama-70b --weights v1=95,v2=5 --why "canary of v2"',
)  # fmt: skip


@verb(
    split_app, "set", 'farhop split set tokyo --model llama-70b --weights v1=95,v2=5 --why "canary of v2"', writes=True
)
def split_set(
    region: Annotated[str, typer.Argument(help="The region whose balancers follow it.")],
    model: Annotated[str, typer.Option("--model", help="The model whose versions share its traffic.")],
    weights: Annotated[
        str, typer.Option("--weights", metavar="VERSION=N,...", help="Each version's share, such as v1=95,v2=5.")
    ],
    why: Why,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Split a model's traffic between its versions.

    For a canary, an A/B test or a switch. Only the weights change: rules and stickiness stay. Exit code 1 if somebody
    else changed it meanwhile.
    """
    from farhop_cli.by_model import set_split

    return set_split(region, model, weights, why, by, fleet_options)


def _unset_by_model(app: typer.Typer, name: str) -> None:
    @verb(app, "unset", f"farhop {name} unset tokyo --model llama-70b", writes=True)
    def unset(
        region: Region,
        model: OfModel = None,
        why: Why = "back to the configuration",
        by: By = None,
        *,
        fleet_options: FleetOptions,
    ) -> int:
        """Go back to the configuration.

        For one model or all. Exit code 1 if nothing is set.
        """
        from farhop_cli import by_model

        return by_model.unset(noun(name), region, model, why, by, fleet_options)


_unset_by_model(policy_app, "policy")
_unset_by_model(split_app, "split")
