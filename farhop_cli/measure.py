"""`farhop bench`: runs a benchmark of `farhop_lab.bench` and prints its result as a table or as JSON.

One function for each subcommand; it returns the exit code. `routing`, `fidelity` and `chaos` measure no cost: see the
modules of these names. Never measures anything itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from farhop_cli import show
from farhop_cli.exits import fail, warn
from farhop_lab.bench import console as consoles
from farhop_lab.bench import decide as decisions
from farhop_lab.bench import hits as cached
from farhop_lab.bench import hostile as attacks
from farhop_lab.bench import intake as intakes
from farhop_lab.bench import picker as pickers
from farhop_lab.bench import relay as relays
from farhop_lab.bench import results
from farhop_lab.bench import scrape as scrapes
from farhop_lab.bench import sim as sims
from farhop_lab.bench import soak as soaks
from farhop_lab.bench import trie as tries
from farhop_lab.bench import ttft as ttfts
from farhop_lab.bench.harness import BenchError

BUSY_SHARE = 0.25  # of the processors: a load average above it before the run leaves too little for the run
WHOLE_SHARE = 0.99  # of the streams of a region that dies
_COST_COLUMNS = ("what", ">median µs", ">least µs", ">most µs")
_T = TypeVar("_T")


def decide(as_json: bool) -> int:
    """Measure what a decision costs; the exit code."""
    with show.waiting(f"measuring decide; the figures are CPU time, medians of {decisions.REPEATS} repeats"):
        rows = decisions.decide()
    return _per_request("decide", rows, decisions.REQUESTS, decisions.REPEATS, as_json)


def tenants(as_json: bool) -> int:
    """Measure what limits, usage and audit cost a request; the exit code."""
    from farhop_lab.bench import tenants as parts

    with show.waiting(f"measuring tenants; the figures are CPU time, medians of {parts.REPEATS} repeats"):
        rows = parts.tenants()
    return _per_request("tenants", rows, parts.REQUESTS, parts.REPEATS, as_json)


def _per_request(bench: str, rows: list[decisions.Row], requests: int, repeats: int, as_json: bool) -> int:
    if as_json:
        show.json({"bench": bench, "unit": "CPU µs per request", "rows": rows})
    else:
        title = f"{bench}: CPU µs per request, {requests} requests, {repeats} repeats"
        show.table(title, _COST_COLUMNS, [_cost_row(row) for row in rows])
    return 0


def _cost_row(row: decisions.Row) -> list[str]:
    return [row.what, *map(show.number, (row.median_us, row.least_us, row.most_us))]


def dns(networks: int, seconds: float, as_json: bool) -> int:
    """Measure what a DNS answer costs; the exit code, 1 if it is above the bound."""
    from farhop_lab.bench import dns as answers

    with show.waiting(f"measuring dns: {networks} client networks, {seconds:g} s for each server"), _measured():
        found = answers.run(networks, seconds)
    rows = found.rows
    least = rows[0].cpu_us
    over = next(row.cpu_us for row in rows if row.name == "farhop") / least
    if as_json:
        show.json(
            {"bench": "dns", "unit": "CPU µs per answer", "networks": networks, "times_the_echo": over,
             **msgspec.to_builtins(found)}
        )  # fmt: skip
    else:
        latencies = (">mean ms", ">worst ms", ">p99 ms at half", ">waited µs")
        columns = ("server", ">CPU µs", ">times the echo", ">answers/s", ">lost", *latencies)
        listed = [
            [row.name, show.number(row.cpu_us), f"{row.cpu_us / least:.2f}", f"{row.qps:.0f}", str(row.lost),
             f"{row.mean_ms:.2f}", f"{row.worst_ms:.2f}", f"{row.half_p99_ms:.2f}",
             f"{row.half_waited_us:.0f}"]
            for row in rows
        ]  # fmt: skip
        show.table(f"dns: a client subnet and a cookie in each question, {networks} networks", columns, listed)
        show.line("at half of its load: the 99th percentile, and how long a server had no core, for each answer")
        for name, why in found.left_out.items():
            show.line(f"{name} is left out: {why}")
    return 1 if over > answers.TIMES_MAX else 0


def anycast(repeats: int, as_json: bool) -> int:
    """Measure how long clients lose an entry that dies; the exit code."""
    from farhop_lab.bench import anycast as sites

    why = sites.missing()
    if why:
        show.line(f"anycast: nothing is measured: {why}")
        return 0
    with show.progress("measuring anycast") as progress, _measured():
        rows = sites.measure(repeats, progress)
    if as_json:
        show.json({"bench": "anycast", "unit": "ms from the event", "rows": rows})
        return 0
    columns = ("what happened", "speaker", ">route ms", ">astray ms", ">worst", ">lost")
    listed = [
        [row.event, row.speaker, f"{row.route_ms:.0f}", f"{row.astray_ms:.0f}", f"{row.astray_worst_ms:.0f}",
         str(row.lost)]
        for row in rows
    ]  # fmt: skip
    title = f"anycast: {sites.PER_S:g} new connections a second to an address that two sites announce"
    show.table(f"{title}, medians of {repeats}", columns, listed)
    show.line("route: the router's kernel has another; astray: the last connection to the site or without an answer")
    show.line("lost: connections without an answer, of the worst repeat; announcers probe as by default")
    return 0


def upload(repeats: int, as_json: bool) -> int:
    """Measure how many round trips a large prompt takes over a long link; the exit code, 1 beyond the bound."""
    from farhop_lab.bench import upload as oceans

    why = oceans.missing()
    if why:
        show.line(f"upload: nothing is measured: {why}")
        return 0
    with show.progress("measuring upload") as progress:
        rows = _done(oceans.measure(repeats, progress=progress))
    charged = oceans.charged_trips(oceans.BODY_BYTES)
    if as_json:
        show.json({"bench": "upload", "unit": "round trips", "charged": charged, "rows": rows})
    else:
        kernel = ("congestion control", "slow start after idle")
        listed = [
            [
                row.congestion,
                "yes" if row.slow_start_after_idle else "no",
                *(f"{row.trips[k]:.2f}" for k in oceans.KINDS),
            ]
            for row in rows
        ]
        title = (
            f"upload: round trips of {oceans.RTT_MS:g} ms that {oceans.BODY_BYTES:,} bytes take, medians of {repeats}"
        )
        show.table(title, (*kernel, *(f">{kind}" for kind in oceans.KINDS)), listed)
        show.line("a connection new, after small requests alone, used just before, the same while a small request used")
        show.line(f"another last, and after {oceans.IDLE_S:g} s of rest; the cost model charges {charged:g}")
    return 0 if all(oceans.is_warm(row) for row in rows) else 1


def relay(*, quick: bool, only: str, repeats: int | None, streams: int | None, tls: bool, as_json: bool) -> int:
    """Measure what a relayed request costs, here and in other proxies; the exit code, 1 if a row has errors."""
    plan = results.planned(quick=quick, repeats=repeats, idle_streams=streams, tls=tls)
    names = [name.strip() for name in only.split(",") if name.strip()]
    with show.progress("measuring relay") as progress:
        found = _done(relays.measure(plan, names, progress))
    if as_json:
        show.json({"bench": "relay", "unit": "CPU µs of the proxy's processes", **results.document(found)})
    else:
        _costs(found)
        _show_comparison(found)
        _notes(found)
    return 1 if any(row.trouble for row in found.rows) else 0


def _done(work: Coroutine[Any, Any, _T]) -> _T:
    with _measured():
        return asyncio.run(work)


@contextlib.contextmanager
def _measured() -> Iterator[None]:
    """Ends the command with a line if what is measured cannot be."""
    try:
        yield
    except BenchError as error:
        fail(f"bench: {error}")


def _costs(found: results.Comparison) -> None:
    first = found.rows[0] if found.rows else results.Row(name="")
    streams = [count for count, _ in found.plan.streams]
    columns = [
        "proxy",
        *(f">{size // 1024} KB" for size in found.plan.sizes),
        *(f">chunk, {n} streams" for n in streams),
    ]
    rows = [
        [
            row.name,
            *(_cost(row.request_us.get(size), first.request_us.get(size)) for size in found.plan.sizes),
            *(_cost(row.chunk_us.get(count), first.chunk_us.get(count)) for count in streams),
        ]
        for row in found.rows
    ]
    way = ", TLS to clients" if found.plan.tls else ""
    title = f"relay{way}: CPU µs of the proxy's processes per request and chunk, medians of {found.rounds} (× row 1)"
    show.table(title, columns, rows)


def _cost(figure: results.Figure | None, first: results.Figure | None) -> str:
    if figure is None:
        return show.NONE
    if figure.errors:
        return f"{figure.errors} errors"
    times = results.ratio(figure, first)
    return f"{figure.median:,.1f}" + (f" ({times:.2f})" if times is not None else "")


def _show_comparison(found: results.Comparison) -> None:
    columns = ["proxy", ">CPU ms/s at rest", ">peak/s, 1 KB", ">at rate/s", ">p50 + ms", ">p99 + ms", ">KiB per stream"]
    title = (
        "relay: without load; at full load; at half of that (at most 1,000/s) beyond the way straight to the upstream; "
        "memory of an open stream"
    )
    show.table(title, columns, [_second(row) for row in found.rows])


def _notes(found: results.Comparison) -> None:
    show.line(f"load: {found.load}; upstream: {found.upstream}, for streams uvloop")
    if found.others > BUSY_SHARE * found.cpus:
        show.line(f"others ran here, too (load average {found.others:.1f}, {found.cpus} CPUs): trust no latency")
    if 0 < found.rounds < found.plan.repeats:
        show.line(f"the machine was slow: {found.rounds} of {found.plan.repeats} rounds within the time")
    for row in found.rows:
        if row.trouble:
            show.line(f"{row.name}: {row.trouble}")
    for name, why in found.absent.items():
        show.line(f"{name}: left out, {why}")


def _second(row: results.Row) -> list[str]:
    latency, held = row.latency, row.stream_bytes
    peak = round(row.peak_per_s) if row.peak_per_s else None
    shown = [row.name, show.number(row.rest_ms_per_s), show.number(peak)]
    if latency is None:
        shown += [show.NONE] * 3
    elif latency.errors:
        shown += [show.number(round(latency.rate_per_s)), f"{latency.errors} errors", show.NONE]
    else:
        added = latency.p50_ms - latency.direct_p50_ms, latency.p99_ms - latency.direct_p99_ms
        shown += [show.number(round(latency.rate_per_s)), *(show.number(ms, 2) for ms in added)]
    return [*shown, show.number(held / 1024 if held is not None else None)]


def soak(requests: int, as_json: bool) -> int:
    """Watch the regional tier's memory over many requests; the exit code, 1 if any was answered wrongly."""
    with show.progress("soaking") as progress:
        found = _done(soaks.measure(requests, progress))
    if as_json:
        show.json({"bench": "soak", "per_request_bytes": found.per_request_bytes, **msgspec.to_builtins(found)})
        return 1 if found.errors else 0
    columns = (">requests", ">share", ">RSS MiB", ">CPU µs per request")
    rows = [
        [
            show.number(mark.requests),
            f"{mark.share:.0%}",
            show.number(mark.rss_bytes / 2**20),
            show.number(mark.cpu_us if mark.requests else None),
        ]
        for mark in found.marks
    ]
    show.table("soak: farhop regional, 16 replicas, prompts of 1 KB, no two the same", columns, rows)
    show.line(f"growth from half to the end: {found.per_request_bytes:,.1f} bytes per request; {found.errors} errors")
    if found.requests < found.asked:
        show.line(f"the machine was slow: {found.requests:,} of {found.asked:,} requests within {soaks.LIMIT_S:g} s")
    return 1 if found.errors else 0


def hostile(quick: bool, as_json: bool) -> int:
    """Measure what hostile bodies cost beside a plain one; the exit code, 1 beyond the bounds."""
    with show.progress("measuring hostile bodies") as progress:
        found = _done(attacks.measure(quick=quick, progress=progress))
    if as_json:
        show.json({"bench": "hostile", "holds": found.holds, **msgspec.to_builtins(found)})
        return 0 if found.holds else 1
    plain = found.rows[0].cpu_ms
    rows = [[r.what, show.number(r.cpu_ms), show.number(r.cpu_ms / plain, 2), str(r.status)] for r in found.rows]
    title = "hostile: CPU ms of both tiers for a body of 1 MiB, the least of three"
    show.table(title, ("body", ">ms", ">x plain", ">status"), rows)
    show.line(
        f"an innocent's p99: {found.alone_ms:.1f} ms alone, {found.beside_plain_ms:.1f} ms beside {attacks.CLIENTS} "
        f"clients with plain prompts, {found.beside_worst_ms:.1f} ms beside as many with {found.worst.what!r}"
    )
    show.line(
        f"event loops were late by {found.huge_lag_ms:.1f} ms at most beside bodies of {attacks.HUGE_BYTES >> 20} MiB, "
        f"{found.quiet_lag_ms:.1f} ms beside small ones"
    )
    verdict = "hold" if found.holds else "BROKEN"
    show.line(f"bounds: {attacks.COST_MAX:g} x the cost, {attacks.DELAY_MAX:g} x the delay: {verdict}")
    return 0 if found.holds else 1


def picker(quick: bool, as_json: bool) -> int:
    """Measure what a picked request costs; the exit code, 1 beyond the bound or if a request was answered wrongly."""
    why = pickers.missing()
    if why is not None:
        show.line(f"picker: nothing is measured: Envoy is {why}")
        return 0
    with show.progress("measuring picker") as progress:
        found = _done(pickers.measure(2 if quick else 5, 2.0 if quick else 5.0, progress))
    if as_json:
        show.json({"bench": "picker", "unit": "CPU ms of the picker per request", **msgspec.to_builtins(found)})
    else:
        columns = ["picker", *(f">{size // 1024} KB" for size in pickers.SIZES)]
        columns.append(">at rest")
        lines = [
            [row.name, *(f"{row.cpu_ms[size][0]:.2f}" for size in pickers.SIZES), f"{row.rest_share:.1%} of a core"]
            for row in found.rows
        ]
        lines.append(["ratio", *(f"{found.ratios[size]:.2f}" for size in pickers.SIZES), ""])
        show.table(f"picker: CPU ms per request behind Envoy, medians of {found.rounds}", columns, lines)
        for row in found.rows:
            if row.errors:
                show.line(f"{row.name}: {row.errors} requests were not answered with 200")
    within = all(ratio <= pickers.RATIO_MAX for ratio in found.ratios.values())
    return 0 if within and not any(row.errors for row in found.rows) else 1


def scrape(as_json: bool) -> int:
    """Measure what watching replicas costs; the exit code, 1 if pages of the engines were refused."""
    with show.waiting(f"measuring scrape; the figures are CPU time, medians of {decisions.REPEATS} repeats"):
        rows = scrapes.read()
        with _measured():
            watched = scrapes.watch()
    if as_json:
        found = {**msgspec.to_builtins(watched), "core_share": watched.core_share}
        show.json({"bench": "scrape", "unit": "CPU µs per page", "rows": rows, "watcher": found})
        return 1 if watched.refused else 0
    title = f"scrape: CPU µs to read a page, {scrapes.PAGES} pages"
    show.table(title, _COST_COLUMNS, [_cost_row(row) for row in rows])
    show.line(
        f"watcher, {watched.replicas:,} replicas: {watched.pages_per_s:,.0f} pages/s of "
        f"{watched.page_bytes // 1024} KB, {watched.cpu_us:,.0f} CPU µs each: "
        f"{watched.core_share:.0%} of one core at 1,000/s"
    )
    if watched.refused:
        show.line(f"refused: {watched.refused}")
    return 1 if watched.refused else 0


def intake(as_json: bool) -> int:
    """Measure what the regions' reports cost a global balancer; the exit code, 1 beyond the bound."""
    with show.waiting(f"measuring intake; the figures are CPU time, medians of {intakes.REPEATS} repeats"):
        found = intakes.measure()
    over = found.core_share > intakes.LIMIT_SHARE
    if as_json:
        document = {**msgspec.to_builtins(found), "core_share": found.core_share, "core_share_max": intakes.LIMIT_SHARE}
        show.json({"bench": "intake", "unit": "CPU µs per report", **document})
        return int(over)
    title = (
        f"intake: CPU µs per report, {found.regions} regions with {found.models} models, {intakes.HELD:,} requests held"
    )
    columns = (*_COST_COLUMNS, f">of a core at {intakes.REPORTS_PER_S}/s each")
    show.table(title, columns, [[*_cost_row(one), f"{found.share_of(one):.1%}"] for one in found.rows])
    show.line(f"intake, the first two: {found.core_share:.1%} of a core; at most {intakes.LIMIT_SHARE:.0%} is meant")
    return int(over)


def hits(as_json: bool) -> int:
    """Measure how well cached prefixes are predicted; the exit code."""
    with show.progress("measuring hits") as progress, _measured():
        rows = cached.measure(progress)
    if as_json:
        show.json({"bench": "hits", "unit": "tokens per request", "rows": rows})
        return 0
    columns = (
        "known by", ">prompt", ">found cached", ">expected", ">off by", ">exact", ">TTFT p50 ms", ">p95 ms"
    )  # fmt: skip
    lines = [
        [
            row.what,
            *(show.number(round(n)) for n in (row.prompt_tokens, row.found_tokens, row.expected_tokens)),
            show.number(row.error_tokens),
            f"{row.exact_share:.0%}",
            *(show.number(ms) for ms in (row.ttft_p50_ms, row.ttft_p95_ms)),
        ]
        for row in rows
    ]
    asked = rows[0].requests if rows else 0
    title = f"hits: tokens per request, {asked} requests, {cached.ENGINES} engines, others beside, caches reset twice"
    show.table(title, columns, lines)
    return 0


def trie(quick: bool, as_json: bool) -> int:
    """Measure what the prefix trie costs, in memory, CPU time and pauses; the exit code."""
    with show.progress("measuring trie") as progress:
        rows = tries.measure(quick=quick, progress=progress)
    if as_json:
        show.json({"bench": "trie", "rows": rows})
        return 0
    columns = ("what", ">median", ">least", ">most", "unit", ">at most")
    lines = [[r.what, *map(show.number, (r.median, r.least, r.most)), r.unit, show.number(r.limit)] for r in rows]
    title = f"trie: CPU time and memory, {tries.REPEATS} repeats; `at most` is what is meant"
    show.table(title, columns, lines)
    return 0


def console(seconds: float, as_json: bool) -> int:
    """Measure what the console costs its server and a browser; the exit code, 1 if a bound is missed."""
    with show.progress("measuring the console") as progress:
        progress("the server and its viewers")
        rows = _done(consoles.costs(seconds))
        if consoles.has_browser():
            progress("the page in headless Chromium")
            rows += _done(consoles.frames(seconds))
        else:
            warn("frames are not measured: that needs selenium, chromium and chromedriver")
    if as_json:
        show.json({"bench": "console", "rows": rows})
    else:
        lines = [[r.what, show.number(r.value), r.unit, show.number(r.bound), "" if r.held else "missed"] for r in rows]
        title = "console: the server at 12 regions of 20 replicas, the page at 60 regions; CPU time"
        show.table(title, ("what", ">value", "unit", ">at most", ""), lines)
    return 0 if all(row.held for row in rows) else 1


def ttft(rounds: int, engine: ttfts.Engine | None, as_json: bool) -> int:
    """Measure what each tier adds to the time to the first token; the exit code."""
    others = os.getloadavg()[0]
    with show.progress("measuring ttft") as progress:
        rows = _done(ttfts.measure(rounds, engine, progress=progress))
    if as_json:
        show.json({"bench": "ttft", "unit": "ms", "rounds": rounds, "load_average": others, "rows": rows})
        return 0
    columns = ("tokenizer", "prompt", "way", ">p50 ms", ">p90 ms", ">added ms", ">95 % interval", ">x bare", ">CPU ms")
    bare = {(r.tokenizer, r.prompt): r.added.ms for r in rows if r.way == ttfts.BARE and r.added is not None}
    lines = []
    for row in rows:
        shown = [row.tokenizer, row.prompt, row.way, *(show.number(ms, 2) for ms in (row.p50_ms, row.p90_ms))]
        if row.added is None:
            lines.append([*shown, *[show.NONE] * 4])
            continue
        least = bare.get((row.tokenizer, row.prompt), 0.0)
        times = show.number(row.added.ms / least, 1) if least > 0.0 else show.NONE
        span = f"{row.added.low_ms:.2f} to {row.added.high_ms:.2f}"
        lines.append([*shown, show.number(row.added.ms, 2), span, times, show.number(row.cpu_ms, 2)])
    show.table(f"ttft: ms to the first event, medians of {rounds} rounds there and back", columns, lines)
    show.line(
        "added: to the direct way, paired; for both tiers to the regional one, which is what the global tier adds"
    )
    show.line(
        "KV events: two engines report what they cache, and decisions use tokens; otherwise no prompt need be tokenized"
    )
    if others > BUSY_SHARE * (os.cpu_count() or 1):
        show.line(f"others ran here, too (load average {others:.1f}): measure again at rest")
    return 0


def sim(quick: bool, as_json: bool) -> int:
    """Measure how many requests per second of CPU the simulator handles; the exit code, 1 if a world had violations."""
    with show.progress("measuring sim") as progress:
        rows = sims.measure(sims.QUICK if quick else sims.SIZES, progress)
    broken = any(row.violations for row in rows)
    if as_json:
        show.json({"bench": "sim", "unit": "requests per second of CPU", "rows": [row.as_dict() for row in rows]})
        return 1 if broken else 0
    columns = ("world", "router", ">requests/s of CPU", ">CPU µs per request", ">requests", ">virtual s", ">CPU s")
    found = [(r.per_s, 1e6 * r.cpu_s / max(1, r.requests), r.requests, r.simulated_s, r.cpu_s) for r in rows]
    show.table(
        "sim: requests concluded after a warm-up, in one process",
        columns,
        [[row.what, row.router, *map(show.number, figures)] for row, figures in zip(rows, found, strict=True)],
    )
    return 1 if broken else 0


def resume_cost(as_json: bool) -> int:
    """Measure what a chunk costs more if its stream can be continued; the exit code."""
    from farhop_lab.bench import resume_cost as costs

    with show.progress("measuring chunks"):
        found = costs.measure()
    if as_json:
        show.json({"bench": "resume cost", "us_per_chunk": msgspec.to_builtins(found)})
        return 0
    show.table(
        f"resume: CPU time of a chunk in the tap, medians of {costs.ROUNDS} rounds of {costs.CHUNKS:,}, in turn",
        ("kind", ">µs", ">more than off, µs"),
        [[kind, f"{one.us:.2f}", f"{one.more_us:.2f}"] for kind, one in found.items()],
    )
    return 0


def resume_kills(kills: int, text: bool, as_json: bool) -> int:
    """Kill a region under streams; the exit code, 1 if too few of them end whole, or one differs."""
    from farhop_lab.bench import resume as resumes
    from farhop_lab.world.world import WorldError

    with show.progress("killing a region") as progress:
        try:
            found = asyncio.run(resumes.regions_killed(kills, progress=progress, by_text=text))
        except WorldError as error:
            fail(f"resume: {error}")
    wrong = found.whole_share < WHOLE_SHARE or found.altered > 0
    gaps_ms = {f"p{100 * share:g}": found.gap_ms(share) for share in (0.5, 0.99)}
    if as_json:
        document = {"bench": "resume kills", **msgspec.to_builtins(found), "whole_share": found.whole_share}
        show.json({**document, "gap_ms": gaps_ms})
        return 1 if wrong else 0
    show.table(
        f"resume: a region killed {found.kills:,} times, under {found.broken:,} streams that it served",
        ("what", ">count"),
        [
            ["whole, and as the uninterrupted answer", show.number(found.whole)],
            ["of another text", show.number(found.altered)],
            *([f"ended with an error: {what}", show.number(count)] for what, count in sorted(found.ended.items())),
        ],
    )
    for what in found.wrong:
        show.line(what, "red")
    show.line(f"{100 * found.whole_share:.2f} % whole; longest pause p50 {gaps_ms['p50']:.0f} ms, p99 "
              f"{gaps_ms['p99']:.0f} ms", "bold")  # fmt: skip
    return 1 if wrong else 0


def resume(interruptions: int, seed: int, text: bool, as_json: bool) -> int:
    """Interrupt streams and compare them with whole ones; the exit code, 1 if one differs."""
    from farhop_lab.bench import resume as resumes
    from farhop_lab.world.world import WorldError

    with show.progress("interrupting streams") as progress:
        try:
            found = asyncio.run(resumes.measure(interruptions, seed, progress, by_text=text))
        except WorldError as error:
            fail(f"resume: {error}")
    if as_json:
        show.json({"bench": "resume", "seed": seed, **msgspec.to_builtins(found)})
        return 1 if found.wrong else 0
    show.table(
        f"resume: {found.streams:,} streams under {found.cuts:,} cut connections and {found.kills:,} SIGKILLs",
        ("what", ">count"),
        [
            ["whole, and as the uninterrupted answer", show.number(found.whole)],
            *([f"counted by a {what}", show.number(count)] for what, count in sorted(found.counted.items())),
            *([f"ended with an error: {what}", show.number(count)] for what, count in sorted(found.ended.items())),
        ],
    )
    for what in found.wrong:
        show.line(what, "red")
    show.line(
        f"{found.lost_bytes:,} bytes lost, {found.doubled_or_altered:,} answers with bytes doubled or altered", "bold"
    )
    return 1 if found.wrong else 0


def law(worlds: int, first: int, workers: int, as_json: bool) -> int:
    """Run random worlds of laws; the exit code, 1 if the law was broken in one."""
    from farhop_lab.studies import law_worlds

    with show.progress("playing worlds") as progress:
        played, seen, violations = law_worlds.prove(first, worlds, workers, progress)
    if as_json:
        show.json({"bench": "law", "first": first, "worlds": played, "seen": dict(seen), "broken": violations})
        return 1 if violations else 0
    rows = [[what, show.number(count)] for what, count in sorted(seen.items())]
    show.table(f"law: what happened in {played:,} worlds, from number {first:,}", ("what", ">times"), rows)
    for violation in violations:
        show.line(violation, "red")
    show.line(f"{played:,} worlds; the law was {'broken' if violations else 'kept in each'}", "bold")
    return 1 if violations else 0
