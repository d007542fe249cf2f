"""`farhop limit` against a real etcd: one document for a tenant, changed a key and a model at a time."""

import json

from farhop.store.documents import limits

SET = ("limit", "set", "eu-only", "--why", "contract", "--by", "ann")
KEY = "/farhop/v1/limit/eu-only"


def test_omitted_limits_stay_and_all_limits_are_shown(cli, stands):
    result = cli.run(*SET, "--home", "virginia", "--requests-per-minute", "600")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (
        0, "tenant eu-only: 600 requests per minute; lent out by virginia",
    )  # fmt: skip
    assert cli.run(*SET, "--model", "llama", "--tokens-per-day", "1000000").exit_code == 0
    assert cli.run(*SET, "--requests-per-day", "9000").exit_code == 0
    assert "8 requests at once" in cli.run(*SET, "--key", "k1", "--concurrency", "8").stdout
    one = limits.decode(stands.get(KEY))
    assert (one.home, one.author, one.why) == ("virginia", "ann", "contract")
    sizes = {(limit.key, limit.model): limit.sizes() for limit in one.limits}
    assert sizes == {
        ("", ""): {"requests_per_minute": 600, "requests_per_day": 9000}, ("", "llama"): {"tokens_per_day": 1_000_000},
        ("k1", ""): {"concurrency": 8},
    }  # fmt: skip
    shown = cli.run("limit", "get").stdout
    assert "tenant eu-only, model llama: 1,000,000 tokens per day" in shown
    assert "600 requests per minute" in cli.run("limit", "history").stdout


def test_one_limit_or_all_limits_can_be_unset(cli, stands):
    cli.run(*SET, "--home", "virginia", "--requests-per-minute", "600")
    cli.run(*SET, "--key", "k1", "--requests-per-minute", "6")
    assert "nothing was changed" in cli.failed(cli.run("limit", "unset", "eu-only", "--model", "llama"), 1)
    assert cli.run("limit", "unset", "eu-only", "--key", "k1").exit_code == 0
    assert len(limits.decode(stands.get(KEY)).limits) == 1
    assert cli.run("limit", "diff").exit_code == 1
    assert cli.run("limit", "unset", "eu-only", "--all").exit_code == 0
    assert stands.get(KEY) is None
    assert "nothing was changed" in cli.failed(cli.run("limit", "unset", "eu-only"), 1)


def test_bad_input_names_the_field_and_the_remedy(cli, stands):
    good = ("--home", "virginia", "--requests-per-minute", "600")
    assert "--requests-per-minute" in cli.failed(cli.run(*SET), 2)
    assert "--home: give it" in cli.failed(cli.run(*SET, "--requests-per-minute", "6"), 2)
    assert "contradicts" in cli.failed(cli.run(*SET, *good, "--requests-per-day", "599"), 1)
    assert "TENANT" in cli.failed(cli.run("limit", "set", "a/b", "--why", "x", *good), 2)
    stands.put(KEY, b"nonsense")
    assert "limit unset" in cli.failed(cli.run(*SET, *good), 1)
    assert "--all" in cli.failed(cli.run("limit", "unset", "eu-only"), 1)
    assert cli.run("limit", "unset", "eu-only", "--all").exit_code == 0


def test_a_dry_run_writes_nothing(cli, stands):
    result = cli.run(*SET, "--home", "virginia", "--requests-per-minute", "600", "--dry-run")
    assert (result.exit_code, stands.get(KEY)) == (0, None)
    assert "dry run, nothing is written" in result.stdout


def test_limit_per_user_is_kept_in_addition_to_the_limit_of_all_users(cli, stands):
    cli.run(*SET, "--home", "virginia", "--requests-per-minute", "600")
    result = cli.run(*SET, "--each-user", "--requests-per-minute", "20")
    assert result.stderr.splitlines() == [
        "farhop: --home: the law allows no records of eu-only in virginia, so its users count as one; "
        "give one of frankfurt"
    ]
    assert result.stdout.splitlines()[0] == "tenant eu-only, user each: 20 requests per minute; lent out by virginia"
    assert [(limit.each_user, limit.requests_per_minute) for limit in limits.decode(stands.get(KEY)).limits] == [
        (False, 600), (True, 20)
    ]  # fmt: skip
    assert cli.run(*SET, "--home", "frankfurt").stderr == ""
    assert "users count as one" in cli.run(*SET, "--home", "tokyo").stderr
    assert cli.run("limit", "unset", "eu-only", "--each-user").exit_code == 0
    assert cli.run(*SET, "--home", "virginia").stderr == ""
    assert len(limits.decode(stands.get(KEY)).limits) == 1


def test_a_limit_for_an_unknown_name_is_set_with_a_warning(cli, stands):
    result = cli.run(*SET, "--home", "virginia", "--requests-per-minute", "9", "--model", "nosuch", "--key", "nokey")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        'farhop: --model: no region serves "nosuch" now; there is m',
        'farhop: --key: eu-only has no key "nokey", issued or in the law; see `farhop key list`',
    ]
    made = [cli.run("key", "create", tenant, "--why", "w", "--json") for tenant in ("eu-only", "anywhere")]
    own, foreign = (json.loads(one.stdout)["keys"][0]["id"] for one in made)
    for key in (own, "jwt:corp", "cert:nightly"):
        assert cli.run(*SET, "--requests-per-minute", "9", "--model", "m", "--key", key).stderr == ""
    assert "has no key" in cli.run(*SET, "--requests-per-minute", "9", "--key", foreign).stderr


def test_a_pool_is_joined_and_left(cli, stands):
    cli.run(*SET, "--home", "virginia", "--requests-per-minute", "600")
    output = cli.run(*SET, "--pool", "gold").stdout
    found = "tenant eu-only: 600 requests per minute, with what idles in pool gold; lent out by virginia"
    assert output.splitlines()[0] == found
    cli.run(*SET, "--requests-per-day", "9000")
    assert [limit.pool for limit in limits.decode(stands.get(KEY)).limits] == ["gold"]
    assert "lend nothing" in cli.failed(cli.run(*SET, "--each-user", "--requests-per-day", "9", "--pool", "gold"), 1)
    assert cli.run(*SET, "--pool", "").exit_code == 0
    assert [limit.pool for limit in limits.decode(stands.get(KEY)).limits] == [""]


def test_a_budget_is_given_in_usd_and_held_in_whole_microdollars(cli, stands):
    stands.prices = {"epoch": 1, "models": ["llama"], "more": False}
    result = cli.run(
        *SET, "--home", "virginia", "--model", "llama", "--usd-per-day", "50", "--usd-per-month", "1000.25"
    )
    assert result.stdout.splitlines()[0] == (
        "tenant eu-only, model llama: 50 USD per day, 1,000.25 USD per month; lent out by virginia"
    )
    (one,) = limits.decode(stands.get(KEY)).limits
    assert one.sizes() == {"micro_usd_per_day": 50_000_000, "micro_usd_per_month": 1_000_250_000}
    assert "50 USD per day" in cli.run("limit", "get").stdout
    assert "50 USD per day" in cli.run("limit", "history").stdout
    output = cli.run(*SET, "--usd-per-day", "0.1")
    assert output.exit_code == 0
    assert "requests for m will be refused: no price" in output.stderr, "m is served"
    assert "contradicts" in cli.failed(cli.run(*SET, "--model", "llama", "--usd-per-month", "3"), 1)
