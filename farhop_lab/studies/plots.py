"""Results as pictures for a report: latency and goodput by router, flows between regions on a map, use over time, cost.

Needs matplotlib (`pip install farhop[plots]`), which is imported when a picture is drawn. Each picture says what it
shows, of what, and in which unit; only what was measured is drawn. Writes only the files it names.
"""

from __future__ import annotations

from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

from farhop_lab.studies import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farhop_lab.scenarios.load import Scenario
    from farhop_lab.studies.cell import Result

PANELS_MAX = 6
LINES_MAX = 30
COLOURS = ("#0b6e99", "#d1495b", "#edae49", "#5b8e3e", "#7d4e9f", "#66666e", "#00a6a6", "#b5651d", "#e377c2", "#17324d")
SHOWN_SHARE = 0.001  # of all requests: smaller flows are not drawn
BEND = 0.22
LABEL_PLACES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8)  # along an arc, the best one first
_WIDTH_IN = 7.5
_DPI = 150
_CHARS_PER_IN = 11.0  # of a title in STYLE, less what is left of the axes


STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.titleweight": "bold", "axes.titlesize": 10, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip


class PlotsError(Exception):
    """Pictures cannot be drawn; the text is one line with the remedy."""


def draw(scenario: Scenario, results: Sequence[Result], out: Path) -> list[Path]:
    """Draw all pictures for which there are data; returns their files. Raises PlotsError."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise PlotsError("plots need matplotlib; run `pip install farhop[plots]`") from None
    mpl.use("Agg")
    makers: dict[str, Callable[[Scenario, Sequence[Result]], Any]] = {
        "latency": latency, "goodput": goodput, "flows": flows, "use": use, "cost": cost
    }  # fmt: skip
    files: list[Path] = []
    with mpl.rc_context(STYLE):
        for name, make in makers.items():
            figure = make(scenario, results)
            if figure is not None:
                files.append(out / f"{scenario.doc.name}-{name}.png")
                _save(figure, files[-1])
    return files


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise PlotsError(f"{path}: {error.strerror or error}; give a folder that can be written to") from None
    finally:
        plt.close(figure)


def _by_router(results: Sequence[Result]) -> dict[str, list[Result]]:
    """At the highest load; at most LINES_MAX routers."""
    top = max(result.key.load for result in results)
    rows = tables.rows(result for result in results if result.key.load == top)
    return dict(list({router: those for (_, router, _), those in rows.items()}.items())[:LINES_MAX])


def _title(
    what: str, scenario: Scenario, results: Sequence[Result], width_in: float, *, every_load: bool = False
) -> str:
    """What a picture shows, and of what, in lines that fit its width. Without `every_load` it is of the highest."""
    doc = scenario.doc
    seeds = len({result.key.seed for result in results})
    load = max(result.key.load for result in results)
    at = f" at load {load:g}" if len(doc.loads) > 1 and not every_load else ""
    fleet = ", ".join(f"{name} {site.replicas} {site.gpu.upper()}" for name, site in doc.sites.items())
    about = (
        f"{doc.name}{at}: {fleet}; {doc.duration_s - doc.warm_up_s:g} s, {seeds} seed{'s' * (seeds != 1)}, simulated"
    )
    return f"{what}\n{fill(about, int(_CHARS_PER_IN * width_in))}"


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _line(place: int) -> str:
    """Another line style when the colours repeat."""
    return ("-", "--", ":")[place // len(COLOURS) % 3]


def _weight(router: str) -> dict[str, Any]:
    """Farhop's line is wider, and above the others."""
    return {"linewidth": 2.4, "zorder": 4.0} if router == "farhop" else {"linewidth": 1.4}


def _panels(by_router: dict[str, list[Result]]) -> tuple[dict[str, list[Result]], str]:
    """Those that have a panel, and what a title says of the others."""
    more = f"; the first {PANELS_MAX} of {len(by_router)} routers" if len(by_router) > PANELS_MAX else ""
    return dict(list(by_router.items())[:PANELS_MAX]), more


def _marker(place: int) -> str:
    """Another marker when the colours repeat."""
    return "os^"[place // len(COLOURS) % 3]


# -- pictures


def latency(scenario: Scenario, results: Sequence[Result]) -> Any:
    """Time to first token: the share of requests within a number of ms, by router (means over seeds)."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(_WIDTH_IN, 4.5))
    shares = [percent / 100 for percent in range(1, 101)]
    drawn = 0
    for place, (router, those) in enumerate(_by_router(results).items()):
        known = [result.ttft_quantiles for result in those if result.ttft_quantiles]
        if not known:
            continue
        drawn += 1
        values = [fmean(column) for column in zip(*known, strict=True)]
        axes.plot(values[:99], shares[:99], _line(place), color=_colour(place), label=router, **_weight(router))
    if not drawn:
        plt.close(figure)
        return None
    aim = scenario.doc.objective.ttft_ms
    axes.axvline(aim, color="#999999", linestyle=":", linewidth=1)
    axes.annotate(
        f"objective {aim:g} ms", (aim, 0.03), color="#666666", fontsize=8, ha="right", rotation=90, va="bottom"
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time to first token, ms (log scale; up to p99)")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1)
    axes.set_title(_title("Time to first token by router", scenario, results, _WIDTH_IN), loc="left")
    axes.legend(loc="upper left" if drawn <= 6 else "center left", bbox_to_anchor=None if drawn <= 6 else (1.0, 0.5))
    return figure


def goodput(scenario: Scenario, results: Sequence[Result]) -> Any:
    """Good answers a second against load, by router, with 95 % intervals over seeds; for one load, a bar each."""
    import matplotlib.pyplot as plt

    points: dict[str, list[tuple[float, float, float]]] = {}
    for (_, router, load), those in tables.rows(results).items():
        good = tables.figure(those, "good_per_s")
        if good is not None:
            points.setdefault(router, []).append((load, good.mean, good.half or 0.0))
    points = dict(list(points.items())[:LINES_MAX])
    if not points:
        return None
    bars = max(len(those) for those in points.values()) == 1
    figure, axes = plt.subplots(figsize=(_WIDTH_IN, 1.2 + 0.3 * len(points) if bars else 4.5))
    aim = scenario.doc.objective
    what = f"good answers a second (TTFT <= {aim.ttft_ms:g} ms, TPOT <= {aim.tpot_ms:g} ms)"
    if bars:
        names, means, halves = zip(*((name, *those[0][1:]) for name, those in points.items()), strict=True)
        colours = [COLOURS[0] if name == "farhop" else "#9aa7b2" for name in names]
        axes.barh(names, means, xerr=halves, color=colours, error_kw={"elinewidth": 1, "capsize": 2})
        axes.invert_yaxis()
        axes.set_xlabel(what)
    else:
        for place, (router, those_points) in enumerate(points.items()):
            loads, goods, wide = zip(*sorted(those_points), strict=True)
            axes.errorbar(
                loads, goods, wide, linestyle=_line(place), color=_colour(place), label=router, marker="o",
                markersize=3, elinewidth=0.8, capsize=2, **_weight(router),
            )  # fmt: skip
        axes.set_xlabel("load, as a factor of the scenario's")
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        few = len(points) <= 6
        axes.legend(loc="best" if few else "center left", bbox_to_anchor=None if few else (1.0, 0.5))
    shown = "Goodput by router; bars: 95 % intervals"
    axes.set_title(_title(shown, scenario, results, _WIDTH_IN, every_load=True), loc="left")
    return figure


def flows(scenario: Scenario, results: Sequence[Result]) -> Any:
    """Where requests went: regions at their places, an arrow for each flow, by router."""
    import matplotlib.pyplot as plt

    by_router, more = _panels(_by_router(results))
    regions = {name: scenario.topology.regions[name] for name in scenario.doc.sites}
    regions |= {
        name: scenario.topology.regions[name] for result in results for flow in result.flows for name in flow.split(">")
    }
    if len(regions) < 2:
        return None
    columns = min(2, len(by_router))
    rows = -(-len(by_router) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5.6 * columns, 3.3 * rows), squeeze=False)
    places = {name: (region.longitude, region.latitude) for name, region in regions.items()}
    maps = [
        (axes, *_map(axes, router, those, places))
        for axes, (router, those) in zip(panels.flat, by_router.items(), strict=False)
    ]
    for axes in list(panels.flat)[len(by_router) :]:
        axes.set_visible(False)
    shown = f"Where requests were answered; arrows: from where they came, % of all{more}"
    title = _title(shown, scenario, results, 5.6 * columns)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    figure.draw_without_rendering()  # from now on all is at its place, so texts can make room for each other
    for axes, names, shares in maps:
        taken = [name.get_window_extent() for name in names]
        for (entry, region), share in sorted(shares.items(), key=lambda flow: -flow[1]):
            _label(axes, places[entry], places[region], f"{share:.1%}", taken)
    return figure


def _map(
    axes: Any, router: str, results: Sequence[Result], places: dict[str, tuple[float, float]]
) -> tuple[list[Any], dict[tuple[str, str], float]]:
    """Without the shares beside its arrows: returns the regions' texts, and what is shown of all requests."""
    flows: dict[tuple[str, str], int] = {}
    for result in results:
        for flow, count in result.flows.items():
            entry, _, region = flow.partition(">")
            flows[entry, region] = flows.get((entry, region), 0) + count
    total = sum(flows.values()) or 1
    entered = {name: sum(n for (entry, _), n in flows.items() if entry == name) for name in places}
    shares = {(entry, region): count / total for (entry, region), count in flows.items() if entry != region}
    shares = {flow: share for flow, share in shares.items() if share >= SHOWN_SHARE}
    for (entry, region), share in shares.items():
        axes.annotate(
            "", xy=places[region], xytext=places[entry],
            arrowprops={
                "arrowstyle": "-|>", "color": "#d1495b", "linewidth": 0.6 + 24 * share, "alpha": 0.75,
                "connectionstyle": f"arc3,rad={BEND}", "shrinkA": 12, "shrinkB": 14, "mutation_scale": 12,
            },
        )  # fmt: skip
    names = []
    for name, (x, y) in places.items():
        home = flows.get((name, name), 0)
        axes.scatter([x], [y], s=60 + 900 * entered[name] / total, color="#0b6e99", alpha=0.85, zorder=3)
        kept = f"{home / entered[name]:.0%} at home" if entered[name] else "no clients"
        names.append(
            axes.annotate(
                f"{name}\n{kept}", (x, y), (0, -20), textcoords="offset points", ha="center", va="top", fontsize=8,
                zorder=5, path_effects=_halo(),
            )
        )  # fmt: skip
    xs, ys = [x for x, _ in places.values()], [y for _, y in places.values()]
    axes.set_xlim(min(xs) - 30, max(xs) + 30)
    axes.set_ylim(min(ys) - 28, max(ys) + 26)
    axes.set_xlabel("longitude, degrees east")
    axes.set_ylabel("latitude, degrees north")
    abroad = sum(n for (entry, region), n in flows.items() if entry != region) / total
    axes.set_title(f"{router}: {abroad:.1%} of answers from abroad", loc="left")
    return names, shares


def _thin_out(figure: Any, texts: Sequence[Any]) -> None:
    """Remove each text that would cover one before it."""
    figure.draw_without_rendering()  # from now on all is at its place
    taken: list[Any] = []
    for text in texts:
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def _label(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str, taken: list[Any]) -> None:
    """Beside the arc, on the side to which it bends, as near to its middle as there is room among what is `taken`;
    left out if there is none.
    """
    (x0, y0), (x1, y1) = axes.transData.transform([start, end])
    away = 14.0 / max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1.0)
    for along in LABEL_PLACES:
        # arc3 puts its control point `rad` of the length aside: a Bezier curve of degree 2; and a bit for the text.
        aside = 2.0 * along * (1.0 - along) * BEND + away
        at = (x0 + along * (x1 - x0) + aside * (y1 - y0), y0 + along * (y1 - y0) - aside * (x1 - x0))
        label = axes.annotate(
            text, axes.transData.inverted().transform(at), fontsize=7, color="#8f2d3b", ha="center", va="center",
            zorder=5, path_effects=_halo(),
        )  # fmt: skip
        box = label.get_window_extent()
        if not any(box.overlaps(other) for other in taken):
            taken.append(box)
            return
        label.remove()


def _halo() -> list[Any]:
    """White around a text, so that it can be read over lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def use(scenario: Scenario, results: Sequence[Result]) -> Any:
    """How much of each region's slots was in use over the run, by router (mean of the seeds)."""
    import matplotlib.pyplot as plt

    by_router, more = _panels(_by_router(results))
    if not any(result.curves for those in by_router.values() for result in those):
        return None
    columns = min(2, len(by_router))
    rows = -(-len(by_router) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(5.4 * columns, 2.6 * rows + 0.6), squeeze=False, sharex=True, sharey=True
    )
    doc = scenario.doc
    hours = 24.0 / doc.day_s if doc.days else None
    for axes, (router, those) in zip(panels.flat, by_router.items(), strict=False):
        for place, region in enumerate(doc.sites):
            curves = [result.curves[region] for result in those if result.curves.get(region)]
            if not curves:
                continue
            values = [100 * fmean(column) for column in zip(*curves, strict=False)]
            step = those[0].curve_s * (hours or 1.0)
            axes.plot(
                [(i + 0.5) * step for i in range(len(values))],
                values,
                color=_colour(place),
                label=region,
                linewidth=1.4,
                zorder=3,  # above the frame: a region without requests has its line there
                clip_on=False,
            )
        for fault in doc.faults:
            axes.axvline(fault.at_s * (hours or 1.0), color="#999999", linestyle=":", linewidth=1)
        axes.axvspan(0, doc.warm_up_s * (hours or 1.0), color="#dddddd", alpha=0.5, linewidth=0)
        axes.set_title(router, loc="left")
        axes.tick_params(labelbottom=True)
    panels[0][0].set_ylim(bottom=0)  # only now: it ends the scaling of the axis that all panels share
    for axes in list(panels.flat)[len(by_router) :]:
        axes.set_visible(False)
    figure.supxlabel(
        "hour of the day, UTC (grey: warm-up)" if hours else "seconds (grey: warm-up; dotted: faults)", fontsize=9
    )
    figure.supylabel("requests there, % of its slots", fontsize=9)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside right upper", fontsize=8)
    title = _title(f"Use of each region over the run{more}", scenario, results, 5.4 * columns)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def cost(scenario: Scenario, results: Sequence[Result]) -> Any:
    """The cost of 1,000 good answers against the share of good answers; a point per router and load."""
    import matplotlib.pyplot as plt

    points: dict[str, list[tuple[float, float, float]]] = {}
    for (_, router, load), those in tables.rows(results).items():
        good, paid = (tables.figure(those, name) for name in ("good_per_s", "usd_per_hour"))
        share = tables.figure(those, "good_share")
        if good is None or paid is None or share is None or good.mean <= 0.0 or paid.mean <= 0.0:
            continue
        points.setdefault(router, []).append((1000 * paid.mean / 3600 / good.mean, 100 * share.mean, load))
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(_WIDTH_IN, 4.5))
    points = dict(list(points.items())[:LINES_MAX])
    loads: list[Any] = []
    for place, (router, those_points) in enumerate(points.items()):
        xs, ys = [x for x, _, _ in those_points], [y for _, y, _ in those_points]
        size, style = (9 if router == "farhop" else 6), _marker(place) + _line(place)
        axes.plot(xs, ys, style, color=_colour(place), label=router, markersize=size, linewidth=1, alpha=0.9)
        if len(those_points) > 1:
            for x, y, load in (those_points[0], those_points[-1]):
                text = axes.annotate(
                    f"x{load:g}", (x, y), (4, 4), textcoords="offset points", fontsize=7, color=_colour(place)
                )
                loads.append(text)
    aim = scenario.doc.objective
    axes.axhline(100 * aim.good, color="#999999", linestyle=":", linewidth=1)
    axes.set_xlabel("US dollars per 1,000 good answers (GPUs and egress at the topology's prices)")
    axes.set_ylabel("good answers, %")
    shown = (
        f"Cost against objective: TTFT <= {aim.ttft_ms:g} ms and TPOT <= {aim.tpot_ms:g} ms (dotted: {aim.good:.0%})"
    )
    axes.set_title(_title(shown, scenario, results, _WIDTH_IN, every_load=True), loc="left")
    few = len(points) <= 6
    axes.legend(loc="best" if few else "center left", bbox_to_anchor=None if few else (1.0, 0.5))
    _thin_out(figure, loads)
    return figure
