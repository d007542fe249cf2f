"""`farhop status`: the regions as each global balancer sees them, and the replicas and queue of each region.

A balancer that does not answer is a row, not an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from farhop_cli import admin, running, show
from farhop_cli.admin import AdminError
from farhop_cli.exits import NEGATIVE, fail
from farhop_cli.show import number, word
from farhop_lab.world_file import RegionFile

_VIEW = (
    "seen from", "region", "state", ">rtt ms", ">wait ms", ">slots", ">in flight", ">report age s", "why",
)  # fmt: skip
_REGIONAL = ("region", "state", ">under way", ">queued", ">queued tok", ">trie nodes", "why")
_REPLICAS = (
    "region", "replica", "state", ">in flight", ">slots", ">engine runs", ">waits", ">kv tok", ">of",
    ">prefill ms/tok", ">tpot ms", ">sample age s", "why",
)  # fmt: skip


class Seen(msgspec.Struct, frozen=True):
    """What one balancer said, or why it did not."""

    region: str
    url: str
    status: dict[str, Any] | None
    error: str = ""


def run(path: Path, as_json: bool) -> int:
    """Show the world's state; the exit code: 1 if any region is down or any balancer silent."""
    here = running.open_world(path)
    upper, lower = asyncio.run(_ask_all(here.file.regions))
    down = down_regions(upper, lower)
    if as_json:
        show.json({"global": upper, "regional": lower, "down": down})
    else:
        show.table("regions, as each global balancer sees them", _VIEW, [row for one in upper for row in _views(one)])
        show.table("regional balancers", _REGIONAL, [_balancer(one) for one in lower])
        show.table("replicas", _REPLICAS, [row for one in lower for row in _replicas(one)])
    if down:
        fail(f"down: {', '.join(down)}", NEGATIVE)
    return 0


async def _ask_all(regions: dict[str, RegionFile]) -> tuple[list[Seen], list[Seen]]:
    async with admin.session() as http:

        async def ask(region: str, url: str) -> Seen:
            try:
                status = await admin.get(http, url, "/status")
                return Seen(region, url, status, "" if status is not None else f"{url} has no /status")
            except AdminError as error:
                return Seen(region, url, None, str(error))

        async def tier(url_of: Callable[[RegionFile], str]) -> list[Seen]:
            return list(await asyncio.gather(*(ask(name, url_of(one)) for name, one in regions.items())))

        return await tier(lambda one: one.global_admin), await tier(lambda one: one.regional_admin)


def down_regions(upper: list[Seen], lower: list[Seen]) -> list[str]:
    """The regions with a balancer that is silent, or that some global balancer holds for down; sorted."""
    silent = {one.region for one in (*upper, *lower) if one.status is None}
    seen = {str(r.get("region")) for one in upper for r in _parts(one, "regions") if r.get("state") == "down"}
    return sorted(silent | seen)


def _views(one: Seen) -> list[list[str]]:
    if one.status is None:
        return [[one.region, "", "unreachable", *[show.NONE] * 5, one.error]]
    return [_view(one.region, region) for region in _parts(one, "regions")]


def _view(seen_from: str, region: dict[str, Any]) -> list[str]:
    instances = [i for i in region.get("instances") or [] if isinstance(i, dict)]
    offers = [list((i.get("models") or {}).values()) for i in instances]
    waits = [o["wait_ms"] for models in offers for o in models if "wait_ms" in o]
    # The models of one instance share its replicas' slots.
    slots = [max((o.get("slots_free", 0) for o in models), default=0) for models in offers]
    return [
        seen_from,
        word(region.get("region")),
        word(region.get("state")) + (" (forced)" if region.get("forced") else ""),
        number(region.get("rtt_ms")),
        number(min(waits, default=None)),
        number(sum(slots) if slots else None),
        number(region.get("in_flight")),
        number(min((i["report_age_s"] for i in instances if "report_age_s" in i), default=None), 2),
        word(region.get("why")),
    ]


def _balancer(one: Seen) -> list[str]:
    status = one.status
    if status is None:
        return [one.region, "unreachable", *[show.NONE] * 4, one.error]
    figures = (number(status.get(f), 0) for f in ("under_way", "queued_requests", "queued_tokens", "trie_nodes"))
    return [one.region, "answers", *figures, ""]


def _replicas(one: Seen) -> list[list[str]]:
    return [
        [
            one.region,
            word(replica.get("replica")),
            word(replica.get("state")),
            number(replica.get("in_flight")),
            number(replica.get("slots")),
            number(replica.get("engine_running"), 0),
            number(replica.get("engine_waiting"), 0),
            number(replica.get("kv_tokens"), 0),
            number(replica.get("kv_tokens_total"), 0),
            number(replica.get("prefill_ms_per_token"), 4),
            number(replica.get("tpot_ms"), 2),
            number(replica.get("sample_age_s"), 2),
            word(replica.get("why")),
        ]
        for replica in _parts(one, "replicas")
    ]


def _parts(one: Seen, field: str) -> list[dict[str, Any]]:
    parts = (one.status or {}).get(field)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
