"""A run's report as one HTML file: verdicts, the timeline and its plots, checks and figures. Nothing is loaded from
anywhere.

Pure. Whatever a fleet reported is in it as text, never as markup; the number of points is bounded, however long the
run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from math import log10
from typing import TYPE_CHECKING

from farhop_drill.document import MEASURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_drill.measures import Canary
    from farhop_drill.outcome import Outcome

WIDTH, HEIGHT, LEFT, TOP = 940, 190, 60, 16
POINTS_MAX = 4000
_COLOURS = ("#4269d0", "#efb118", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5", "#ff8ab7")
_BAD = "#d62728"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1e23;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .7rem .25rem 0;
border-bottom:1px solid #e3e5e8;vertical-align:top}th{font-weight:600}
.v{font-weight:700;padding:.1rem .5rem;border-radius:.3rem;color:#fff}.PASS{background:#2a7d3c}.FAIL{background:#b3261e}
.ABORTED{background:#a15c00}.NOT_RUN{background:#5b6470}p.s{color:#555}svg{width:100%;height:auto}
@media(prefers-color-scheme:dark){body{background:#15181c;color:#e6e8eb}td,th{border-color:#333a42}p.s{color:#a5adb7}}
"""


def page(outcome: Outcome) -> str:
    """The file."""
    when = datetime.fromtimestamp(outcome.epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    body = [
        f"<h1>{escape(outcome.title)} {_verdict(outcome.verdict)}</h1>",
        f"<p class=s>{escape(outcome.run)} on {escape(outcome.fleet)}, by {escape(outcome.author)}, {when}, "
        f"{outcome.took_s:.1f} s</p>",
        f"<p>{escape(outcome.why)}</p>" if outcome.why else "",
        "<h2>Hypotheses</h2>",
        _table(("", "hypothesis", "measured"), [
            (_verdict(one.verdict), escape(one.hypothesis), escape(_value(one.value, one.unit) + _because(one.why)))
            for one in outcome.judged
        ]),
        "<h2>Timeline</h2>",
        _plots(outcome),
        _table(("at", "what", "took", ""), [
            (f"{one.at_s:.2f} s", escape(one.what), f"{one.took_s:.2f} s",
             escape(one.output or ("" if one.ok else "failed")))
            for one in outcome.done
        ]),
        "<h2>Measured</h2>",
        _table(("measure", "", "what it is"), [
            (escape(name), _value(value, MEASURES[name].unit), escape(MEASURES[name].what))
            for name, value in outcome.measures.items() if name in MEASURES
        ]),
        "<h2>Safety checks</h2>",
        _table(("", "check", "seen"), [
            ("held" if one.held else "<b>not held</b>", escape(one.check), escape(one.seen)) for one in outcome.findings
        ]),
    ]  # fmt: skip
    title = escape(f"{outcome.drill}: {outcome.verdict}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _verdict(verdict: str) -> str:
    return f"<span class='v {escape(verdict)}'>{escape(verdict)}</span>"


def _value(value: float | None, unit: str) -> str:
    return "nothing" if value is None else f"{value:,.4g} {unit}"


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are markup already."""
    if not rows:
        return "<p class=s>none</p>"
    top = "".join(f"<th>{escape(one)}</th>" for one in head)
    return (
        f"<table><tr>{top}</tr>"
        + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        + "</table>"
    )


# -- plots


def _plots(outcome: Outcome) -> str:
    canaries = _thinned(outcome.canaries)
    if not canaries:
        return "<p class=s>no canary was sent</p>"
    ends = max(outcome.marks.ended_s or 0.0, *(one.ended_s for one in canaries))
    regions = sorted({one.region for one in canaries if one.region})
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(regions)}
    key = " ".join(f"<span style='color:{colours[name]}'>&#9679; {escape(name)}</span>" for name in regions)
    return (
        f"<p class=s>Time to the first token, ms (log), by the region that served; "
        f"<span style='color:{_BAD}'>&#10005; failed or broken</span> {key}</p>"
        f"{_ttft(outcome, canaries, ends, colours)}"
        "<p class=s>Share of slots in use, by region, as balancers say</p>"
        f"{_used(outcome, ends, colours)}"
    )


def _thinned(canaries: Sequence[Canary]) -> list[Canary]:
    """All that failed, and of the others as many as fit."""
    bad = [one for one in canaries if one.code][:POINTS_MAX]
    good = [one for one in canaries if not one.code]
    step = max(1, -(-len(good) // POINTS_MAX))
    return [*good[::step], *bad]


def _ttft(outcome: Outcome, canaries: Sequence[Canary], ends: float, colours: dict[str, str]) -> str:
    most = max((one.ttft_ms or 1.0 for one in canaries), default=10.0)
    top = max(1.0, log10(max(10.0, most)))
    marks = []
    for one in canaries:
        x = _x(one.began_s, ends)
        if one.code:
            y = _y(min(top, log10(max(1.0, (one.ended_s - one.began_s) * 1e3))), top)
            what = escape(f"{one.began_s:.2f} s, {one.tenant} at {one.entry}: {one.code}")
            marks.append(
                f"<path d='M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8' stroke='{_BAD}' stroke-width=2>"
                f"<title>{what}</title></path>"
            )
        else:
            y = _y(log10(max(1.0, one.ttft_ms or 1.0)), top)
            marks.append(f"<circle cx={x:.1f} cy={y:.1f} r=2.4 fill='{colours.get(one.region, '#888')}'/>")
    labels = "".join(_label(_y(n, top), f"{10**n:,}") for n in range(int(top) + 1))
    return _svg(outcome, ends, labels + "".join(marks))


def _used(outcome: Outcome, ends: float, colours: dict[str, str]) -> str:
    step = max(1, len(outcome.looks) // POINTS_MAX)
    lines = []
    for name in sorted({name for look in outcome.looks for name in look.used}):
        points = " ".join(
            f"{_x(look.at_s, ends):.1f},{_y(min(1.0, look.used[name]), 1.0):.1f}"
            for look in outcome.looks[::step] if name in look.used
        )  # fmt: skip
        lines.append(f"<polyline fill=none stroke-width=1.6 stroke='{colours.get(name, '#888')}' points='{points}'/>")
    return _svg(outcome, ends, _label(_y(0.0, 1.0), "0") + _label(_y(1.0, 1.0), "1") + "".join(lines))


def _svg(outcome: Outcome, ends: float, inner: str) -> str:
    marks = outcome.marks
    stripes = [(at, f"step {n + 1}") for n, (_, at) in enumerate(marks.steps)]
    stripes += [(marks.restore_s, "restore")] if marks.restore_s is not None else []
    stripes += [(marks.restored_s, "restored")] if marks.restored_s is not None else []
    lines = "".join(
        f"<line x1={_x(at, ends):.1f} x2={_x(at, ends):.1f} y1={TOP} y2={TOP + HEIGHT} stroke=#888 "
        f"stroke-dasharray='3 3'/><text x={_x(at, ends) + 3:.1f} y={TOP + 9 + 11 * (n % 3)} font-size=10 "
        f"fill=#888>{escape(name)}</text>"
        for n, (at, name) in enumerate(stripes)
    )
    ticks = "".join(
        f"<text x={_x(ends * n / 8, ends):.1f} y={TOP + HEIGHT + 14} font-size=10 fill=#888 "
        f"text-anchor=middle>{ends * n / 8:.0f} s</text>"
        for n in range(9)
    )
    return f"<svg viewBox='0 0 {WIDTH} {TOP + HEIGHT + 22}' role=img>{lines}{ticks}{inner}</svg>"


def _label(y: float, text: str) -> str:
    return (
        f"<line x1={LEFT} x2={WIDTH - 10} y1={y:.1f} y2={y:.1f} stroke=#8883 />"
        f"<text x={LEFT - 6} y={y + 3:.1f} font-size=10 fill=#888 text-anchor=end>{text}</text>"
    )


def _x(at_s: float, ends: float) -> float:
    return LEFT + (WIDTH - LEFT - 10) * at_s / max(ends, 1e-9)


def _y(value: float, top: float) -> float:
    return TOP + HEIGHT * (1.0 - value / max(top, 1e-9))
