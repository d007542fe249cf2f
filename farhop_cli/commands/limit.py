"""`farhop limit`: what tenants, their keys and models may use, fleet-wide.

Only declares the commands and their options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.commands.wiring import group, verb
from farhop_cli.options import By, FleetOptions, Why, regions

limit_app = group(
    "limit", "What tenants, their keys and models may use, fleet-wide.",
    'set acme --home virginia --requests-per-minute 600 --why "the contract"', "virginia",
)  # fmt: skip
LimitedTenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")]
OfKey = Annotated[
    str,
    typer.Option(
        "--key", metavar="KEY", help="Only for this key: an issued key's id, a name in the law, jwt:ISSUER, cert:NAME."
    ),
]
OnModel = Annotated[str, typer.Option("--model", help="Only for this model.")]
EachUser = Annotated[bool, typer.Option("--each-user", help="For each of its users separately.")]
MOST = 1_000_000_000_000
RequestsMinute = Annotated[
    int | None, typer.Option("--requests-per-minute", metavar="N", min=1, max=MOST, help="At most N requests a minute.")
]
RequestsDay = Annotated[
    int | None, typer.Option("--requests-per-day", metavar="N", min=1, max=MOST, help="At most N requests a day.")
]
InputMinute = Annotated[
    int | None,
    typer.Option(
        "--input-tokens-per-minute", metavar="N", min=1, max=MOST, help="At most N tokens of prompts a minute."
    ),
]
InputDay = Annotated[
    int | None,
    typer.Option("--input-tokens-per-day", metavar="N", min=1, max=MOST, help="At most N tokens of prompts a day."),
]
OutputMinute = Annotated[
    int | None,
    typer.Option(
        "--output-tokens-per-minute", metavar="N", min=1, max=MOST, help="At most N tokens of answers a minute."
    ),
]
OutputDay = Annotated[
    int | None,
    typer.Option("--output-tokens-per-day", metavar="N", min=1, max=MOST, help="At most N tokens of answers a day."),
]
TokensMinute = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-minute", metavar="N", min=1, max=MOST, help="At most N tokens of prompts and answers a minute."
    ),
]
TokensDay = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-day", metavar="N", min=1, max=MOST, help="At most N tokens of prompts and answers a day."
    ),
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", min=1, max=MOST, help="At most N requests at once.")
]
LEAST_USD, MOST_USD = 0.000001, 1_000_000.0
UsdDay = Annotated[
    float | None,
    typer.Option(
        "--usd-per-day", metavar="USD", min=LEAST_USD, max=MOST_USD, help="Cost a day, in USD at the balancers' prices."
    ),
]
UsdMonth = Annotated[
    float | None,
    typer.Option(
        "--usd-per-month",
        metavar="USD",
        min=LEAST_USD,
        max=MOST_USD,
        help="Cost in 30 days, in USD at the balancers' prices.",
    ),
]


Home = Annotated[
    str,
    typer.Option(
        "--home",
        metavar="REGION",
        help="The region that counts the tenant's use; needed for its first limit.",
        autocompletion=regions,
    ),
]
SafeShare = Annotated[
    float | None,
    typer.Option(
        "--safe-share",
        metavar="SHARE",
        min=0,
        max=1,
        help="Share (0 to 1) that global balancers may use while they cannot reach the home region.",
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(
        "--pool", metavar="POOL", help="Share what is unused with limits of the same pool; '': leave the pool."
    ),
]
Usage = Annotated[
    Path | None,
    typer.Option(
        "--usage",
        metavar="FOLDER",
        help="With --dry-run: usage files; say what of their last day these limits would have refused.",
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        "--prices", metavar="FILE", help="A price book, for --usage or if no balancer can be asked for its own."
    ),
]


@verb(
    limit_app, "set", 'farhop limit set acme --home virginia --tokens-per-minute 100000 --why "contract"', writes=True
)
def limit_set(
    tenant: LimitedTenant,
    why: Why,
    key: OfKey = "",
    model: OnModel = "",
    each_user: EachUser = False,
    requests_per_minute: RequestsMinute = None,
    requests_per_day: RequestsDay = None,
    input_tokens_per_minute: InputMinute = None,
    input_tokens_per_day: InputDay = None,
    output_tokens_per_minute: OutputMinute = None,
    output_tokens_per_day: OutputDay = None,
    tokens_per_minute: TokensMinute = None,
    tokens_per_day: TokensDay = None,
    concurrency: Concurrency = None,
    usd_per_day: UsdDay = None,
    usd_per_month: UsdMonth = None,
    home: Home = "",
    safe_share: SafeShare = None,
    pool: Pool = None,
    usage: Usage = None,
    prices: Prices = None,
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Limit what a tenant may use, fleet-wide.

    For a tenant, or one of its keys or models; all limits that match a request hold. Limits that are left out stay as
    they are. Exit code 1 if somebody else changed it meanwhile, or limits contradict one another.
    """
    from farhop_cli.limit import Shared, TrialFiles, Whose, micro_usd, set_limit

    sizes = {
        "requests_per_minute": requests_per_minute, "requests_per_day": requests_per_day,
        "input_tokens_per_minute": input_tokens_per_minute, "input_tokens_per_day": input_tokens_per_day,
        "output_tokens_per_minute": output_tokens_per_minute, "output_tokens_per_day": output_tokens_per_day,
        "tokens_per_minute": tokens_per_minute, "tokens_per_day": tokens_per_day, "concurrency": concurrency,
        "micro_usd_per_day": micro_usd("--usd-per-day", usd_per_day),
        "micro_usd_per_month": micro_usd("--usd-per-month", usd_per_month),
    }  # fmt: skip
    against = TrialFiles(usage, prices)
    return set_limit(
        tenant, Whose(key, model, each_user), sizes, Shared(home, safe_share, pool), against, why, by, fleet_options
    )


@verb(limit_app, "unset", "farhop limit unset acme --model llama-70b", writes=True)
def limit_unset(
    tenant: LimitedTenant,
    key: OfKey = "",
    model: OnModel = "",
    each_user: EachUser = False,
    every: Annotated[
        bool, typer.Option("--all", help="All limits of the tenant, also of its keys and models.")
    ] = False,
    why: Why = "not limited any more",
    by: By = None,
    *,
    fleet_options: FleetOptions,
) -> int:
    """Remove a limit.

    That of the tenant, of a key or of a model; with --all every one. Exit code 1 if none is set.
    """
    from farhop_cli.limit import Whose, unset

    return unset(tenant, None if every else Whose(key, model, each_user), why, by, fleet_options)
