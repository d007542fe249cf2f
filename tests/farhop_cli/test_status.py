"""`farhop status`: what each balancer sees; silence is a row; code 1 where anything is down."""

import io
import json
import re

import pytest
from rich.console import Console

from farhop_cli import show, status

REGIONS = ("virginia", "frankfurt", "tokyo")


@pytest.fixture
def healthy(world, made):
    for name in REGIONS:
        world.status[name, "global_admin"] = made.global_status(**dict.fromkeys(REGIONS, "up"))
        world.status[name, "regional_admin"] = made.regional_status(f"{name}-0")
    return world


async def test_healthy_fleet_exits_with_0(healthy, cli):
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    assert not result.stderr
    views = [line.split() for line in result.stdout.splitlines() if "why up" in line]
    assert len(views) == 9
    assert views[0] == ["virginia", "virginia", "up", "9.2", "1.5", "–", "–", "512", "3", "0.25", "why", "up"]
    assert result.stdout.count("137,280") == 3
    assert len(re.findall(r"137,280 +43 +– +0\.0094", result.stdout)) == 3


async def test_a_region_that_is_down_is_code_1(healthy, cli, made):
    healthy.status["frankfurt", "global_admin"] = made.global_status(virginia="up", tokyo="down", frankfurt="suspect")
    result = await cli.in_thread("status", "--wide")
    assert cli.failed(result, 1) == "farhop: down: tokyo\n"
    assert "why down" in result.stdout


async def test_a_suspect_or_draining_region_is_not_down(healthy, cli, made):
    healthy.status["tokyo", "global_admin"] = made.global_status(virginia="suspect", frankfurt="draining")
    assert (await cli.in_thread("status", "--wide")).exit_code == 0


@pytest.mark.parametrize("role", ["global_admin", "regional_admin"])
async def test_a_silent_balancer_is_a_row(healthy, cli, role):
    healthy.silent.add(("tokyo", role))
    result = await cli.in_thread("status", "--wide")
    output = cli.failed(result, 3)
    assert output.startswith("farhop: 5 of 6 balancers answered: http://127.0.0.1:")
    assert "cannot be reached" in output
    row = next(line for line in result.stdout.splitlines() if "unreachable" in line)
    assert row.split()[0] == "tokyo"
    assert "virginia-0" in result.stdout


async def test_json_is_all_there_is(healthy, cli):
    healthy.silent.add(("tokyo", "regional_admin"))
    result = await cli.in_thread("status", "--json")
    output = json.loads(result.stdout)
    assert result.exit_code == 3
    assert output["down"] == []
    assert "cannot be reached" in output["unreachable"][0]
    assert output["summary"]["answered"] == 5
    assert [one["region"] for one in output["global"]] == list(REGIONS)
    assert output["regional"][2]["status"] is None
    assert output["regional"][2]["error"]
    assert output["regional"][0]["error"] == ""


async def test_fields_missing_in_another_version_are_shown_as_a_dash(healthy, cli):
    for name in REGIONS:
        healthy.status[name, "global_admin"] = {"regions": [{"region": name}, 5]}
        healthy.status[name, "regional_admin"] = {}
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    assert "–" in result.stdout


async def test_splits_are_a_table_where_there_are_any(healthy, cli):
    assert "traffic split" not in (await cli.in_thread("status", "--wide")).stdout
    split = {"weights": {"v1": 95.0, "v2": 5.0}, "rules": ["tenant acme: v1"], "sticky": "session", "unserved": ["v2"]}
    healthy.status["tokyo", "regional_admin"] |= {"splits": {"llama": split, "odd": {}, "none": 5}}
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if " llama " in line]
    assert rows == [["tokyo", "llama", "v1=95", "v2=5", "1", "session", "v2"]]


async def test_each_hub_is_a_row_with_its_refused_documents(healthy, cli):
    seen = {"outages": 1, "revision": 7, "balancers": 3, "reports": 12}
    healthy.status["tokyo", "global_admin"]["hubs"] = [
        {"hub": "atlantic", "in_contact": True, "trouble": None, **seen, "refused": {"malformed": 2, "misplaced": 1}},
        {"hub": "pacific", "in_contact": False, "trouble": "silent for 2 s", **seen, "refused": {}},
        {"hub": "odd", "refused": ["?"]},
        "nonsense",
    ]
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.split()[1:2] in (["atlantic"], ["pacific"], ["odd"])]
    first, second, third = (line.split() for line in rows)
    assert " ".join(first) == "tokyo atlantic yes 1 7 3 12 refused: 2 malformed, 1 misplaced"
    assert second == ["tokyo", "pacific", "lost", "1", "7", "3", "12", "silent", "for", "2", "s"]
    assert third[:4] == ["tokyo", "odd", "lost", "–"]


async def test_one_global_balancer_reports_for_the_fleet(healthy, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("FARHOP_TEST_HOP", "x" * 32)
    port = healthy.file.regions["tokyo"].global_admin.rpartition(":")[2]
    (tmp_path / "global.yaml").write_text(
        f"{{region: tokyo, instance: g1, listen: {{port: 0}}, admin: {{port: {port}}}, "
        'etcd: {endpoints: ["127.0.0.1:1"]}, hop: {keys: {k1: "env:FARHOP_TEST_HOP"}, active: k1}}\n'
    )
    result = await cli.in_thread("status", "--wide", "--config", str(tmp_path / "global.yaml"))
    assert (result.exit_code, result.stdout.count("why up")) == (0, 3)
    assert "regional balancers" not in result.stdout
    healthy.silent.add(("tokyo", "global_admin"))
    text = cli.failed(await cli.in_thread("status", "--config", str(tmp_path / "global.yaml")), 2)
    assert f"http://127.0.0.1:{port} cannot be reached" in text


def test_status_without_a_world_names_farhop_up(cli, tmp_path):
    text = cli.failed(cli.run("status", "--world", str(tmp_path / "none.json")), 2)
    assert "farhop up" in text
    assert text.count("\n") == 1


async def test_load_spill_and_prefixes_as_balancers_report_them(healthy, cli, made):
    for name in REGIONS:
        found = healthy.status[name, "global_admin"]
        found |= {"trie_nodes": 1234, "law_epoch": 7}
        for region in found["regions"]:
            believed = {"prefix_nodes": 77, "predicted_hit_tokens": 110.0, "actual_hit_tokens": 100.0}
            region |= {"used_share": 0.5, "headroom_foreign_tokens": 40, "prefix_stream": "connected", **believed}
        figures = {"predicted_hit_tokens": 45.0, "actual_hit_tokens": 50.0, "law_epoch": 6}
        healthy.status[name, "regional_admin"] |= figures
        healthy.pages[name, "global_admin"] = (
            "# TYPE farhop_spill counter\n"
            f'farhop_spilled_requests_total{{balancer="g",region="{name}",target="tokyo"}} 3.0\n'
            'farhop_spilled_requests_total{target="frankfurt"} 2.0\nfarhop_spilled_requests_total{target="x"} much\n'
        )
    late = healthy.status["tokyo", "global_admin"]["regions"][0]
    late |= {"prefix_stream": "behind", "prefix_behind_s": 12.34}
    result = await cli.in_thread("status", "--wide")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["virginia", "tokyo", "up", "9.2", "1.5", "50", "%", "40", "512", "3", "0.25", "why", "up"] in rows
    assert ["tokyo", "answers", "7", "–", "5", "9", "1,234"] in rows
    assert ["virginia", "answers", "7", "–", "5", "0", "1,234"] in rows
    assert ["frankfurt", "tokyo", "connected", "77", "110", "100", "10", "%"] in rows
    assert ["tokyo", "virginia", "behind", "12.3", "s", "77", "110", "100", "10", "%"] in rows
    assert ["tokyo", "answers", "6", "5", "2", "700", "11", "45", "50", "-10", "%"] in rows


async def test_a_shorter_round_trip_through_another_region_is_shown(healthy, cli):
    measured = {"virginia": (1.0, 90.0, 160.0), "frankfurt": (90.0, 1.0, 400.0), "tokyo": (160.0, 230.0, 1.0)}
    for name, rtts_ms in measured.items():
        for region, rtt_ms in zip(healthy.status[name, "global_admin"]["regions"], rtts_ms, strict=True):
            region["rtt_ms"] = rtt_ms
    lines = (await cli.in_thread("status", "--regions")).stdout.splitlines()
    found = [line for line in lines if " through " in line]
    assert [line.split()[:2] for line in found] == [["frankfurt", "tokyo"]]
    assert found[0].rstrip().endswith("why up; 250 ms through virginia")


async def test_routes_are_shown_where_they_are_not_the_default(healthy, cli):
    plain = {"tenant": "", "model": "", "policy": "predictive", "answer": "proxy", "usd_weight_ms": 0.0}
    assert "routes that" not in (await cli.in_thread("status", "--wide")).stdout
    for name in REGIONS:
        healthy.status[name, "global_admin"]["routes"] = [plain]
    assert "routes that" not in (await cli.in_thread("status", "--wide")).stdout
    dear = {"egress_usd_per_hour": 0.5, "egress_spent_usd": 0.000002, "foreign_quota": 0.25}
    healthy.status["tokyo", "global_admin"] |= {
        "routes": [plain, {**plain, "tenant": "acme", "answer": "redirect", "redirect_bytes": 4096, **dear}],
        "routes_author": {"author": "ann", "why": "streams"},
    }
    rows = [line.split() for line in (await cli.in_thread("status", "--wide")).stdout.splitlines()]
    found = ["ann:", "streams"]
    figures = ["redirect", "from", "4,096", "B", "2", "500,000", "25", "%"]
    assert ["tokyo", "acme", "any", "predictive", *figures, *found] in rows
    taken_back = {"routes": [plain], "routes_author": {"author": "ann", "why": "paid", "routes": 0}}
    healthy.status["tokyo", "global_admin"] |= taken_back
    assert "routes that" not in (await cli.in_thread("status", "--wide")).stdout


async def test_overrides_are_shown_once(healthy, cli):
    word = {"action": "drain", "why": "new racks", "author": "ann@ops", "until": "2026-05-01T12:30:00", "left_s": 90.0}
    for name in REGIONS[1:]:
        region = healthy.status[name, "global_admin"]["regions"][2]
        region |= {"state": "draining", "forced": True, "share": 0.25, "override": word}
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    found = ["tokyo", "drain", "ann@ops", "2026-05-01T12:30:00", "1.5", "new", "racks"]
    assert rows.count(found) == 1
    assert result.stdout.count("draining (25 % left)") == 2


async def test_biases_and_pins_are_shown_once(healthy, cli):
    ends = {"why": "new link", "author": "ann@ops", "until": "2026-05-01T12:30:00", "left_s": 90.0}
    words = [
        {"action": "bias", "region": "tokyo", "ms": 50.0, **ends},
        {"action": "pin", "region": "tokyo", "tenant": "eu-only", "model": "", "strict": True, **ends},
    ]
    for name in REGIONS[1:]:
        healthy.status[name, "global_admin"]["operator_overrides"] = words
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    end = "ann@ops 2026-05-01T12:30:00 1.5 new link"
    assert rows.count(f"tokyo bias +50 ms {end}") == 1
    assert rows.count(f"tokyo pin eu-only (strict) {end}") == 1


async def test_a_region_that_is_hot_or_comes_back_is_shown(healthy, cli):
    healthy.status["tokyo", "global_admin"]["regions"][2]["admitted_share"] = 0.4
    healthy.status["virginia", "global_admin"]["regions"][2]["admitted_share"] = 0.0
    healthy.status["frankfurt", "global_admin"]["regions"][2]["admitted_share"] = 1.0
    result = await cli.in_thread("status", "--wide")
    assert result.exit_code == 0
    assert result.stdout.count("up (40 % back)") == 1
    assert result.stdout.count("up (hot)") == 1


@pytest.mark.parametrize("share", [None, True, "much", float("nan"), float("inf")])
def test_a_missing_share_is_shown_as_a_dash(share):
    assert status.percent(share) == "–"


async def test_the_law_of_each_balancer_is_a_row_with_what_is_wrong(healthy, cli):
    law = {
        "epoch": 4, "source": "etcd", "revision": 17, "author": "ann", "why": "audit", "trouble": ["not JSON: x"],
        "etcd_out_of_reach": None, "signed_by": None, "kept_on_disk": False,
    }  # fmt: skip
    assert "the law that each" not in (await cli.in_thread("status", "--wide")).stdout
    healthy.status["tokyo", "global_admin"] |= {"law": law}
    frozen = {
        **law, "trouble": [], "etcd_out_of_reach": "refused", "newest_named": 6, "signed_by": "ops",
        "kept_on_disk": True,
    }  # fmt: skip
    healthy.status["tokyo", "regional_admin"] |= {"law": frozen}
    healthy.status["virginia", "regional_admin"] |= {"law": 5}
    rows = [line.split() for line in (await cli.in_thread("status", "--wide")).stdout.splitlines() if " audit " in line]
    assert rows[0] == ["tokyo", "global", "4", "etcd", "17", "ann", "audit", "unsigned", "no", "not", "JSON:", "x"]
    assert rows[1][:7] == ["tokyo", "regional", "4", "etcd", "17", "ann", "audit"]
    text = " ".join(rows[1][7:])
    assert text == "ops yes frozen, etcd is out of reach: refused; tokens name epoch 6, unknown here"


def test_slow_replica_is_shown_with_the_reason_for_its_state(made):
    found = made.regional_status("gpu-0")
    found["replicas"][0]["slow"] = "slow: 68 ms against 12 of its peers, last sample 40 s ago"
    (row,) = status.replica_rows(status.BalancerStatus("virginia", "http://r", found))
    assert row[-1] == "proven; slow: 68 ms against 12 of its peers, last sample 40 s ago"
    found["replicas"][0]["reports_cached_tokens"] = False
    (row,) = status.replica_rows(status.BalancerStatus("virginia", "http://r", found))
    assert row[-1].endswith("; its answers do not report cached tokens")
    found["replicas"][0]["reports_cached_tokens"] = None  # it gave none yet
    (row,) = status.replica_rows(status.BalancerStatus("virginia", "http://r", found))
    assert "cached tokens" not in row[-1]


async def test_a_configuration_that_was_passed_over_and_what_awaits_a_restart_are_shown(healthy, cli):
    configuration = {"generation": 4, "trouble": ["spill.at: too large"], "awaits_restart": ["listen.port"]}
    healthy.status["virginia", "global_admin"] |= {"configuration": configuration}
    output = " ".join((await cli.in_thread("status")).stdout.split())
    assert "configuration rejected (generation 4 stands): spill.at: too large" in output
    builds = (await cli.in_thread("status", "--wide")).stdout.partition("builds")[2]
    assert "listen.port" in builds
    assert "spill.at: too large" in builds


async def test_status_shows_the_summary_and_each_part_on_demand(healthy, cli):
    plain = (await cli.in_thread("status")).stdout
    assert len(plain.splitlines()) <= 10
    assert plain.startswith("the world in ")
    assert "load: 15 requests under way, 6 queued" in plain
    titles = {
        "--regions": "regions, as each global balancer sees them", "--replicas": "regional balancers",
        "--law": None, "--prefixes": None,
    }  # fmt: skip
    for flag, title in titles.items():
        shown = (await cli.in_thread("status", flag)).stdout
        assert shown.startswith(plain.splitlines()[0])
        for other in filter(None, titles.values()):
            assert (other in shown) == (other == title), (flag, other)
    wide = (await cli.in_thread("status", "--wide")).stdout
    assert all(title in wide for title in filter(None, titles.values()))
    assert "builds" in wide


async def test_status_of_one_region(healthy, cli):
    shown = (await cli.in_thread("status", "--region", "tokyo", "--wide")).stdout
    rows = [line.split() for line in shown.splitlines() if "why up" in line]
    assert [row[1] for row in rows] == ["tokyo"] * 3
    assert "virginia-0" not in shown
    assert "did you mean" in cli.failed(await cli.in_thread("status", "--region", "tokio"), 2)


async def test_watching_redraws_and_outlives_silence(healthy, cli, monkeypatch):
    draws = []

    def sleep(_s):
        draws.append(1)
        healthy.silent.add(("tokyo", "global_admin"))
        if len(draws) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    result = await cli.in_thread("status", "--watch")
    assert result.stdout.count("balancers answered") == 3
    assert "5 of 6 balancers answered" in result.stdout
    assert "give one of them" in cli.failed(await cli.in_thread("status", "--watch", "--json"), 2)


async def test_status_is_redrawn_in_place_on_a_terminal(healthy, cli, monkeypatch):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100, height=30)
    monkeypatch.setattr(show, "console", lambda: show.captures[-1] if show.captures else terminal)
    draws = []

    def sleep(_s):
        draws.append(1)
        if len(draws) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    await cli.in_thread("status", "--watch", "--regions")
    text = out.getvalue()
    assert text.startswith("\x1b[?1049h")  # a screen of its own, which is restored at the end
    assert "\x1b[?1049l" in text
    assert text.count("balancers answered") == 2


async def test_a_pilot_light_is_shown(healthy, cli):
    stands = {"virginia": ("asleep", 0.0), "tokyo": ("waking", 0.25), "frankfurt": ("awake", 1.0)}
    for name, (state, share) in stands.items():
        region = healthy.status[name, "global_admin"]["regions"][2]
        region |= {"pilot_light": {"state": state, "why": "", "warm_share": share}, "admitted_share": share}
    shown = " ".join((await cli.in_thread("status", "--wide")).stdout.split())
    for one in ("asleep", "waking, 25 % back", "awake"):
        assert f"up (pilot-light: {one})" in shown
