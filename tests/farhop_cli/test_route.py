"""`farhop route` against a real etcd: one list of routes for an entry, changed an item at a time."""

import pytest

KEY = "/farhop/v1/route/virginia"


def test_routes_are_set_changed_and_taken_back_one_by_one(cli, stands):
    first = ("route", "set", "virginia", "{answer: redirect}", "--tenant", "eu-only", "--why", "long", "--by", "ann")
    assert cli.run(*first).exit_code == 0
    both = ("route", "set", "virginia", '{"policy": "nearest"}', "--model", "m", "--why", "test", "--by", "bob")
    assert cli.run(*both).exit_code == 0
    routes, authorship = stands.authored("route")
    assert routes == [{"answer": "redirect", "tenant": "eu-only"}, {"policy": "nearest", "model": "m"}]
    assert (authorship.author, authorship.why) == ("bob", "test")
    cli.run("route", "set", "virginia", "{}", "--tenant", "eu-only", "--why", "as all", "--by", "ann")
    assert stands.authored("route")[0] == [{"policy": "nearest", "model": "m"}, {"tenant": "eu-only"}]
    assert 'virginia, model m: {"policy":"nearest"}' in cli.run("route", "get", "virginia").stdout
    output = cli.run("route", "unset", "virginia", "--model", "m", "--why", "done")
    assert "virginia, model m: as configured" in output.stdout
    assert "tenant" not in output.stdout
    assert stands.authored("route")[0] == [{"tenant": "eu-only"}]
    assert cli.run("route", "unset", "virginia", "--why", "all done", "--by", "eve").exit_code == 0
    routes, authorship = stands.authored("route")
    assert (routes, authorship.author, authorship.why) == ([], "eve", "all done")
    assert "configurations apply" in cli.run("route", "get", "virginia").stdout


def test_a_route_of_a_model_served_nowhere_is_set_with_a_warning(cli, stands):
    def said(route):
        return cli.run("route", "set", "virginia", route, "--model", "auto", "--why", "x").stderr

    assert 'no region serves "auto" now; there is m' in said("{policy: nearest}")
    assert "no region serves" not in said("{models: [{model: m}]}"), "it is a name"


def test_handwritten_routes_are_kept(cli, stands):
    stands.put(KEY, b'[{"tenant": "anywhere", "policy": "nearest"}]')
    assert "no author is named" in cli.run("route", "get").stdout
    cli.run("route", "set", "virginia", "{policy: waterfall}", "--why", "x")
    assert stands.authored("route")[0] == [{"tenant": "anywhere", "policy": "nearest"}, {"policy": "waterfall"}]


def test_unreadable_routes_are_not_overwritten(cli, stands):
    stands.put(KEY, b'{"nonsense": 1}')
    put = ("route", "set", "virginia", "{policy: nearest}", "--why", "x")
    assert "cannot be read; remove it with `farhop route unset`" in cli.failed(cli.run(*put), 1)
    one = ("route", "unset", "virginia", "--tenant", "acme")
    assert "to unset it all" in cli.failed(cli.run(*one), 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("set", "virginia", "{policy: fastest}"), 2, "no policy 'fastest'"),
        (("set", "virginia", "{answer: resume}"), 2, "ROUTE: answer"),
        (("set", "virginia", "{bias_ms: {mars: 5}}"), 1, "no region 'mars'"),
        (("set", "virginia", "{tenant: acme}"), 2, "say it by --tenant"),
        (("set", "virginia", "nearest"), 2, "must be a mapping"),
        (("set", "virginia", "{"), 2, "not YAML or JSON"),
        (("set", "virginia", "{models: [{model: m}]}"), 2, "goes with `model`"),
        (
            ("set", "virginia", "{models: [{model: m}], policy: nearest}", "--model", "auto"),
            2,
            "does not go with `models`",
        ),
        (("unset", "virginia", "--tenant", "acme"), 1, "nothing was changed"),
    ],
)
def test_error_is_reported_in_one_line(cli, stands, arguments, code, message):
    assert message in cli.failed(cli.run("route", *arguments, "--why", "x"), code)
    assert stands.authored("route") is None


def test_dry_run_of_a_route_shows_its_decisions(cli, stands):
    route = "{policy: failover, regions: [tokyo, virginia]}"
    output = cli.run("route", "set", "virginia", route, "--tenant", "anywhere", "--why", "x", "--dry-run").stdout
    assert "decides: m of anywhere: to tokyo" in output
    assert stands.authored("route") is None


def test_an_alias_points_to_models_and_not_to_another_alias(cli, stands):
    auto = ("route", "set", "virginia", "{models: [{model: m}, {model: huge}]}", "--model", "auto", "--why", "x")
    output = cli.run(*auto, "--dry-run").stdout
    assert "stands for: m, served in" in output
    assert "unknown: huge is served nowhere now" in output
    assert stands.authored("route") is None
    assert cli.run(*auto).exit_code == 0
    assert stands.authored("route")[0] == [{"models": [{"model": "m"}, {"model": "huge"}], "model": "auto"}]
    round_ = ("route", "set", "virginia", "{models: [{model: auto}]}", "--model", "m", "--why", "x")
    assert "stands for others itself; name those in its place" in cli.failed(cli.run(*round_), 1)


def test_a_mistyped_field_is_reported_with_the_right_one(cli):
    result = cli.run("route", "set", "virginia", "{polcy: nearest}", "--why", "x")
    assert result.exit_code == 2
    assert 'ROUTE: polcy: unknown field; did you mean "policy"?' in result.stderr
