"""`farhop bench`: figures as tables or as JSON, and what is missing said in a line."""

import json
from collections import Counter

import pytest

from farhop_cli import measure as room
from farhop_lab.bench import hostile, relay, soak
from farhop_lab.bench.decide import Row as Decided
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.intake import Intake
from farhop_lab.bench.intake import Row as Taken
from farhop_lab.bench.results import Comparison, Figure, Latency, Plan, Row
from farhop_lab.bench.sim import Row as Simulated
from farhop_lab.bench.soak import MemorySample
from farhop_lab.bench.trie import Row as Tried

ROWS = [
    Row(
        name="farhop regional",
        request_us={1024: Figure(40.0, 39.0, 41.0)},
        chunk_us={32: Figure(5.0, 5.0, 5.0)},
        rest_ms_per_s=12.34,
        peak_per_s=9876.0,
        latency=Latency(4000.0, 1.25, 3.0, 0.25, 0.5),
        stream_bytes=20480.0,
    ),
    Row(name="Envoy", request_us={1024: Figure(60.0, 59.0, 61.0)}, chunk_us={32: Figure(6.0, 6.0, 6.0, 3)}),
    Row(name="HAProxy", trouble="HAProxy: did not start"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(room.decisions, "decide", lambda: [Decided("global, 3 regions", 51.25, 49.0, 60.5)])


@pytest.fixture
def asked(monkeypatch):
    """What `bench relay` asks to be measured; it is told ROWS."""
    plans = []

    async def measure(plan, only, progress):
        progress("round 1")
        plans.append((plan, only))
        return Comparison(
            plan=plan,
            rounds=2,
            load="wrk",
            upstream="nginx",
            rows=ROWS,
            absent={"SGLang router": "not installed"},
            others=3.04,
            cpus=2,
        )

    monkeypatch.setattr(relay, "measure", measure)
    return plans


def test_bench_decide_prints_a_table(cli):
    result = cli.run("bench", "decide")
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if "3 regions" in line]
    assert row.split()[-3:] == ["51.2", "49.0", "60.5"]
    assert not result.stderr


def test_json_is_all_there_is(cli):
    output = json.loads(cli.run("bench", "decide", "--json").stdout)
    assert output["rows"] == [{"what": "global, 3 regions", "median_us": 51.25, "least_us": 49.0, "most_us": 60.5}]


def test_relay_shows_costs_ratios_and_what_went_wrong(cli, asked):
    result = cli.run("bench", "relay", "--repeats", "3", "--only", "regional, envoy")
    assert result.exit_code == 1  # a row has a problem
    output = result.stdout
    assert "60.0 (1.50)" in output
    assert "3 errors" in output  # and no cost beside it
    assert "6.0" not in output.replace("60.0", "")
    assert "HAProxy: did not start" in output
    assert "SGLang router: left out, not installed" in output
    assert "2 of 3 rounds" in output
    assert "load average 3.0, 2 CPUs" in output
    (held,) = [
        line.split() for line in output.splitlines() if line.strip().startswith("farhop regional") and "9,876" in line
    ]
    assert held[-6:] == ["12.3", "9,876", "4,000", "1.00", "2.50", "20.0"]
    ((plan, only),) = asked
    assert (plan.repeats, only) == (3, ["regional", "envoy"])


def test_relay_as_json_and_quick(cli, asked):
    output = json.loads(cli.run("bench", "relay", "--json", "--quick", "--streams", "10").stdout)
    assert output["ratios"]["Envoy"]["request_us"] == {"1024": 1.5}
    assert output["ratios"]["Envoy"]["chunk_us"] == {"32": None}
    ((plan, _),) = asked
    assert plan.limit_s < Plan().limit_s
    assert plan.idle_streams == 10


def test_an_unknown_proxy(cli):
    assert "no proxy is called 'traefik'; there is farhop regional" in cli.failed(
        cli.run("bench", "relay", "--only", "traefik"), 2
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_bench_soak_reports_memory_growth_per_request(cli, monkeypatch, as_json):
    async def measure(requests, progress):
        marks = [
            MemorySample(0.0, 0, 2**27, 0.0),
            MemorySample(0.5, 500, 2**27, 50.0),
            MemorySample(1.0, 1000, 2**27 + 1000, 50.0),
        ]
        return soak.SoakReport(requests, 1000, 0, marks)

    monkeypatch.setattr(soak, "measure", measure)
    result = cli.run("bench", "soak", "--requests", "2000", *(["--json"] if as_json else []))
    assert result.exit_code == 0
    if as_json:
        assert json.loads(result.stdout)["per_request_bytes"] == 2.0
    else:
        assert "2.0 bytes per request; 0 errors" in result.stdout
        assert "1,000 of 2,000 requests" in result.stdout


def test_hostile_bodies(cli, monkeypatch):
    found = hostile.HostileReport(
        [hostile.Row("plain prompt", 2.0, 200), hostile.Row("objects", 1.0, 400)], 1.0, 2.0, 3.0
    )

    async def measure(*, quick, progress):
        return found

    monkeypatch.setattr(hostile, "measure", measure)
    assert "bounds: 3 x the cost, 2 x the delay: hold" in " ".join(cli.run("bench", "hostile").stdout.split())
    found = hostile.HostileReport([*found.rows, hostile.Row("dear", 6.1, 200)], 1.0, 2.0, 3.0)
    result = cli.run("bench", "hostile", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["holds"] is False


def test_impossible_measurement_is_reported_in_one_line(cli, monkeypatch):
    async def measure(requests, progress):
        raise BenchError("no etcd binary: install one")

    monkeypatch.setattr(soak, "measure", measure)
    assert "bench: no etcd binary" in cli.failed(cli.run("bench", "soak"), 2)


def test_the_predicted_and_found_cached_tokens_are_shown(cli, monkeypatch):
    row = room.cached.Row("KV events", 300, 1273.0, 855.0, 877.0, 12.5, 0.5, 17.0, 58.6)
    monkeypatch.setattr(room.cached, "measure", lambda _say: [row])
    output = cli.run("bench", "hits").stdout
    assert all(word in output for word in ("300 requests", "KV events", "1,273", "855", "12.5", "50%", "58.6"))
    assert json.loads(cli.run("bench", "hits", "--json").stdout)["rows"][0]["error_tokens"] == 12.5

    def fails(_say):
        raise BenchError("no etcd binary: install one")

    monkeypatch.setattr(room.cached, "measure", fails)
    assert "bench: no etcd binary" in cli.failed(cli.run("bench", "hits"), 2)


def test_bench_trie_shows_measured_values_and_bounds(cli, monkeypatch):
    asked = []

    def measure(*, quick, progress):
        asked.append(quick)
        progress("repeat 1")
        return [Tried("match of 32 KB, warm", "µs", 6.25, 6.0, 7.5, 10.0), Tried("touch", "µs", 3.5, 3.0, 4.0)]

    monkeypatch.setattr(room.tries, "measure", measure)
    output = cli.run("bench", "trie", "--quick").stdout
    (row,) = [line.split() for line in output.splitlines() if "32 KB" in line]
    assert row[-5:] == ["6.2", "6.0", "7.5", "µs", "10.0"]
    printed = json.loads(cli.run("bench", "trie", "--json").stdout)
    assert printed["rows"][1] == {
        "what": "touch", "unit": "µs", "median": 3.5, "least": 3.0, "most": 4.0, "limit": None,
    }  # fmt: skip
    assert asked == [True, False]


def test_bench_sim_shows_simulated_requests_per_second(cli, monkeypatch):
    asked = []

    def measure(sizes, progress):
        asked.append(sizes)
        progress("3 regions")
        return [Simulated("3 regions, 12 replicas", "farhop", 1500, 45.0, 0.75, len(asked) // 2)]

    monkeypatch.setattr(room.sims, "measure", measure)
    output = cli.run("bench", "sim", "--quick").stdout
    (row,) = [line.split() for line in output.splitlines() if "12 replicas" in line]
    assert row[-6:] == ["farhop", "2,000.0", "500.0", "1,500", "45.0", "0.8"]
    broken = cli.run("bench", "sim", "--json")
    assert broken.exit_code == 1  # a world broke its rules
    printed = json.loads(broken.stdout)
    assert printed["rows"][0]["requests_per_cpu_s"] == 2000.0
    assert asked == [room.sims.QUICK, room.sims.SIZES]


@pytest.mark.parametrize(("taken_us", "code"), [(20.0, 0), (40.0, 1)])
def test_cost_of_reports_is_shown_and_fails_above_its_bound(cli, monkeypatch, taken_us, code):
    rows = [Taken("read", 10.0, 9.0, 11.0), Taken("taken in", taken_us, 9.0, 50.0), Taken("rows", 99.0, 9.0, 99.0)]
    monkeypatch.setattr(room.intakes, "measure", lambda: Intake(60, 4, rows))
    output = cli.run("bench", "intake")
    assert output.exit_code == code
    share = 60 * 20 * (10.0 + taken_us) / 1e6
    assert f"{share:.1%} of a core; at most 5% is meant" in output.output
    document = json.loads(cli.run("bench", "intake", "--json").stdout)
    assert (document["core_share"], document["core_share_max"]) == (pytest.approx(share), 0.05)


def test_bench_law_shows_counts_and_fails_if_the_law_was_broken(cli, monkeypatch):
    asked = []

    def prove(*args):
        asked.append(args[:3])
        return args[1], Counter({"law set": 7}), ["world 4: regional paris: computed"] if args[0] else []

    monkeypatch.setattr("farhop_lab.studies.law_worlds.prove", prove)
    kept = cli.run("bench", "law", "--worlds", "20", "--workers", "2")
    assert (kept.exit_code, "20 worlds; the law was kept in each" in kept.stdout) == (0, True)
    broken = cli.run("bench", "law", "--worlds", "9", "--first", "3", "--workers", "1", "--json")
    assert (broken.exit_code, json.loads(broken.stdout)["broken"]) == (1, ["world 4: regional paris: computed"])
    assert asked == [(0, 20, 2), (3, 9, 1)]
