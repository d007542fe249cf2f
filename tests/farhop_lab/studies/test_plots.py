"""Pictures: each is drawn where there is something to show, and says what it shows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farhop_lab.scenarios.load import Scenario, parse
from farhop_lab.studies import cell, plots, pool
from farhop_lab.studies.cell import Result
from topology.load import load, shipped

TEXT = """
name: drawn
sites:
  virginia: {gpu: l4, replicas: 1}
  tokyo: {gpu: l4, replicas: 1}
work:
  - kind: requests
    figures: {prompt_tokens: 64, answer_tokens: 8, max_tokens: 8}
    clients: {virginia: 2, frankfurt: 1}
duration_s: 8
warm_up_s: 2
routers: [farhop, region-local]
"""


@pytest.fixture(scope="module")
def ran() -> tuple[Scenario, list[Result]]:
    scenario = parse(TEXT, "it", Path(), ["farhop", "region-local"])
    jobs = pool.jobs(scenario, scenario.doc.routers, [1])
    return scenario, [cell.run(job.document, Path(job.folder), job.key, job.recipe) for job in jobs]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def texts(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.long
def test_all_pictures_are_written(ran: tuple[Scenario, list[Result]], tmp_path: Path) -> None:
    files = plots.draw(*ran, tmp_path)
    assert [file.name for file in files] == [
        f"drawn-{name}.png" for name in ("latency", "goodput", "flows", "use", "cost")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000 for file in files)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (plots.latency, ["time to first token, ms", "share of requests", "objective 2000 ms", "region-local"]),
        (plots.goodput, ["good answers a second (TTFT <= 2000 ms", "95 % intervals"]),
        (
            plots.flows,
            [
                "farhop: ",
                "% of answers from abroad",
                "arrows: from where they came, % of all",
                "longitude, degrees east",
                "no clients",
            ],
        ),
        (plots.use, ["% of its slots", "seconds (grey: warm-up", "tokyo"]),
        (plots.cost, ["US dollars per 1,000 good answers", "good answers, %"]),
    ],
)
def test_pictures_say_what_they_show(ran: tuple[Scenario, list[Result]], make: Any, words: list[str]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    figure = make(*ran)
    text = texts(figure)
    assert "drawn: virginia 1 L4, tokyo 1 L4; 6 s, 1 seed, simulated" in text
    assert all(word in text for word in words), text


def test_the_use_of_every_router_lies_within_its_panel(ran: tuple[Scenario, list[Result]]) -> None:
    scenario, results = ran
    busier = [msgspec.structs.replace(results[1], curves={"virginia": [0.5], "tokyo": [0.9]})]
    figure = plots.use(scenario, [results[0], *busier])
    tops = [max(line.get_ydata()) for axes in figure.axes for line in axes.lines if len(line.get_ydata())]
    assert max(tops) == 90.0
    assert all(axes.get_ylim()[0] == 0.0 and axes.get_ylim()[1] > 90.0 for axes in figure.axes)


def test_shares_on_the_map_cover_no_other_text(ran: tuple[Scenario, list[Result]]) -> None:
    import matplotlib as mpl
    from matplotlib.text import Annotation

    mpl.use("Agg")
    scenario, (first, *_) = ran
    topology = load(shipped("five-regions"))
    names = list(topology.regions)
    everywhere = msgspec.structs.replace(first, flows={f"{a}>{b}": 10 for a in names for b in names})
    sites = dict.fromkeys(names, scenario.doc.sites["virginia"])
    of_five = msgspec.structs.replace(scenario.but(sites=sites), topology=topology)
    with mpl.rc_context(plots.STYLE):
        figure = plots.flows(of_five, [everywhere])
        figure.draw_without_rendering()
    found = [text for text in figure.findobj(Annotation) if text.get_text()]
    shares = [text for text in found if text.get_text().endswith("%")]
    assert len(shares) > 8
    for one in shares:
        box = one.get_window_extent()
        assert not [other.get_text() for other in found if other is not one and box.overlaps(other.get_window_extent())]


def test_the_line_of_a_region_without_requests_lies_above_the_frame(ran: tuple[Scenario, list[Result]]) -> None:
    scenario, results = ran
    idle = msgspec.structs.replace(results[0], curves={"virginia": [0.0, 0.0], "tokyo": [0.9, 0.9]})
    (axes,) = plots.use(scenario, [idle]).axes
    assert all(line.get_zorder() > axes.spines["bottom"].get_zorder() for line in axes.lines[:2])


@pytest.mark.parametrize("make", [plots.flows, plots.use])
def test_panels_say_that_they_are_of_the_first_routers_alone(ran: tuple[Scenario, list[Result]], make: Any) -> None:
    scenario, (first, *_) = ran
    many = [
        msgspec.structs.replace(first, key=msgspec.structs.replace(first.key, router=f"router-{n}")) for n in range(8)
    ]
    assert "; the first 6 of 8 routers\n" in texts(make(scenario, many))
    assert "the first" not in texts(make(scenario, many[:6]))


def test_farhops_line_lies_above_the_others(ran: tuple[Scenario, list[Result]]) -> None:
    (axes,) = plots.latency(*ran).axes
    depth = {line.get_label(): line.get_zorder() for line in axes.lines}
    assert depth["farhop"] > depth["region-local"]


def test_each_of_many_routers_differs_in_colour_or_marker(ran: tuple[Scenario, list[Result]]) -> None:
    scenario, (first, *_) = ran
    many = [
        msgspec.structs.replace(first, key=msgspec.structs.replace(first.key, router=f"router-{n}")) for n in range(14)
    ]
    (axes,) = plots.cost(scenario, many).axes
    looks = {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"}
    assert len(looks) == 14
    assert axes.get_legend().get_window_extent().x0 > axes.bbox.x1  # not over the points


def test_loads_beside_points_of_the_cost_cover_no_other(ran: tuple[Scenario, list[Result]]) -> None:
    import matplotlib as mpl
    from matplotlib.text import Annotation

    scenario, (first, *_) = ran
    many = [
        msgspec.structs.replace(first, key=msgspec.structs.replace(first.key, router=f"router-{n}", load=load))
        for n in range(3)
        for load in (1.0, 2.0)
    ]
    with mpl.rc_context(plots.STYLE):
        figure = plots.cost(scenario, many)
        figure.draw_without_rendering()
    assert [text.get_text() for text in figure.findobj(Annotation)] == ["x1"]  # all at one point


def test_goodput_is_a_line_over_several_loads(ran: tuple[Scenario, list[Result]]) -> None:
    scenario, results = ran
    other = [msgspec.structs.replace(one, key=msgspec.structs.replace(one.key, load=2.0)) for one in results]
    figure = plots.goodput(scenario, [*results, *other])
    (axes,) = figure.axes
    assert "load, as a factor" in texts(figure)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["farhop", "region-local"]


@pytest.mark.parametrize("make", [plots.latency, plots.goodput, plots.flows, plots.use, plots.cost])
@pytest.mark.parametrize("several", [True, False])
def test_titles_fit_and_name_the_load_that_is_drawn(
    ran: tuple[Scenario, list[Result]], make: Any, several: bool
) -> None:
    scenario, results = ran
    sites = dict.fromkeys(("virginia", "tokyo", "frankfurt"), scenario.doc.sites["virginia"])
    many = scenario.but(name="a-name-of-some-length", sites=sites, loads=[1.0, 2.0] if several else [1.0])
    if several:
        other = [msgspec.structs.replace(one, key=msgspec.structs.replace(one.key, load=2.0)) for one in results]
        results = [*results, *other]
    import matplotlib as mpl

    with mpl.rc_context(plots.STYLE):
        figure = make(many, results)
        figure.draw_without_rendering()
    titles = [figure._suptitle] if figure._suptitle else [figure.axes[0]._left_title]
    for title in titles:
        box, whole = title.get_window_extent(), figure.bbox
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    assert ("at load 2" in texts(figure)) is (several and make not in (plots.goodput, plots.cost))


def test_without_results_no_plot_is_drawn(ran: tuple[Scenario, list[Result]]) -> None:
    scenario, (first, *_) = ran
    empty = msgspec.structs.replace(first, ttft_quantiles=[], curves={})
    assert plots.latency(scenario, [empty]) is None
    assert plots.use(scenario, [empty]) is None


def test_missing_matplotlib_is_reported_with_its_remedy(
    ran: tuple[Scenario, list[Result]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.PlotsError, match=r"farhop\[plots\]"):
        plots.draw(*ran, tmp_path)
