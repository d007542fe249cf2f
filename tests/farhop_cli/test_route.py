"""`farhop route` against a real etcd: what is written, by whom and why, what is refused, what is told."""

import json

import pytest


def test_a_tenants_route_is_set_changed_shown_and_taken_back(cli, steering):
    first = cli.run(
        "route", "virginia", "{answer: redirect}", "--tenant", "eu-only", "--why", "long", "--author", "ann"
    )
    assert first.exit_code == 0
    assert "virginia, tenant eu-only:" in first.stdout
    both = cli.run("route", "virginia", '{"policy": "nearest"}', "--model", "m", "--why", "test", "--author", "bob")
    assert both.exit_code == 0
    routes, signature = steering.stands("route")
    assert routes == [{"answer": "redirect", "tenant": "eu-only"}, {"policy": "nearest", "model": "m"}]
    assert (signature.author, signature.why) == ("bob", "test")
    cli.run("route", "virginia", "{}", "--tenant", "eu-only", "--why", "as all", "--author", "ann")
    assert steering.stands("route")[0] == [{"policy": "nearest", "model": "m"}, {"tenant": "eu-only"}]
    shown = cli.run("route", "virginia").stdout
    assert 'model m: {"policy":"nearest"}' in shown
    assert "by ann at 20" in shown
    assert cli.run("route", "virginia", "--clear", "--model", "m", "--why", "done").exit_code == 0
    assert steering.stands("route")[0] == [{"tenant": "eu-only"}]
    assert cli.run("route", "virginia", "--clear", "--why", "done").exit_code == 0
    assert steering.stands("route") is None
    assert "its configuration decides" in cli.run("route", "virginia").stdout


def test_json_is_all_there_is(cli, steering):
    told = json.loads(cli.run("route", "virginia", "{policy: nearest}", "--why", "x", "--json").stdout)
    assert (told["known"], told["routes"], told["signed"]["why"]) == (True, [{"policy": "nearest"}], "x")
    assert json.loads(cli.run("route", "virginia", "--json").stdout)["signed"]["why"] == "x"


def test_what_was_written_by_hand_is_kept(cli, steering):
    steering.put("route", b'[{"tenant": "anywhere", "policy": "nearest"}]')
    cli.run("route", "virginia", "{policy: waterfall}", "--why", "x")
    assert steering.stands("route")[0] == [{"tenant": "anywhere", "policy": "nearest"}, {"policy": "waterfall"}]


def test_balancers_that_do_not_know_yet_are_told_of(cli, steering):
    steering.follows = False
    result = cli.run("route", "virginia", "{policy: nearest}", "--why", "x")
    assert result.exit_code == 0
    assert "no global balancer there says so yet" in result.stderr


def test_what_cannot_be_read_is_left_alone(cli, steering):
    steering.put("route", b'{"nonsense": 1}')
    assert "cannot be read" in cli.failed(cli.run("route", "virginia", "{policy: nearest}", "--why", "x"), 1)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("virginia", "{policy: fastest}", "--why", "x"), 2, "no policy 'fastest'"),
        (("virginia", "{answer: resume}", "--why", "x"), 2, "ROUTE: answer"),
        (("virginia", "{bias_ms: {mars: 5}}", "--why", "x"), 1, "no region 'mars'"),
        (("virginia", "{tenant: acme}", "--why", "x"), 2, "say it by --tenant"),
        (("virginia", "nearest", "--why", "x"), 2, "must be a mapping"),
        (("virginia", "{", "--why", "x"), 2, "not YAML or JSON"),
        (("virginia", "{policy: nearest}"), 2, "--why"),
        (("virginia", "{policy: nearest}", "--why", " "), 2, "--why"),
        (("virginia", "{policy: nearest}", "--clear", "--why", "x"), 2, "not both"),
        (("virginia", "--clear", "--why", "x"), 1, "nothing was changed"),
        (("virginia", "--clear", "--tenant", "acme", "--why", "x"), 1, "nothing was changed"),
        (("mars", "{policy: nearest}", "--why", "x"), 2, "no region"),
    ],
)
def test_what_is_at_fault_is_one_line(cli, steering, arguments, code, said):
    assert said in cli.failed(cli.run("route", *arguments), code)
    assert steering.stands("route") is None
