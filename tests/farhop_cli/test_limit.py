"""`farhop limit` against a real etcd: one document for a tenant, changed a key and a model at a time."""

import pytest

from farhop.accounts.usage import Record, lines, price_book
from farhop.store.documents import limits
from farhop_cli.limit import refused

SET = ("limit", "set", "eu-only", "--why", "contract", "--by", "ann")
KEY = "/farhop/v1/limit/eu-only"


def test_what_is_left_out_stays_and_all_of_it_is_told(cli, stands):
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


def test_it_is_unset_alone_or_with_all_others(cli, stands):
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
    assert "--home: is needed" in cli.failed(cli.run(*SET, "--requests-per-minute", "6"), 2)
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


NOON = 1_768_435_200.0


def record(n, at_s, key="k", region="tokyo"):
    return Record(f"{n}-1", at_s, False, (
        "eu-only", key, "llama", "", region, "tokyo", 200, "served", False, "engine", 90, 0, 10, None, 0, 1, 9.0, None,
        100.0, 400, "",
    ))  # fmt: skip


def test_a_dry_run_says_what_it_would_have_refused_of_the_last_day(cli, stands, tmp_path):
    made = [record(n, NOON + n) for n in range(20)] + [record(98, NOON, "other"), record(99, NOON, region="")]
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines([record(97, NOON - 90_000), *made], "farhop/fleet", None)))
    assert refused(tmp_path, "eu-only", "k", "", {"requests_per_minute": 10}) == (
        "would have refused 7 of the 20 requests of the last day: 7 by requests per minute"
    ), "10 at once, and one more every 6 s"
    said = refused(tmp_path, "eu-only", "", "llama", {"requests_per_day": 100, "input_tokens_per_day": 900})
    assert said == "would have refused 11 of the 21 requests of the last day: 11 by input tokens per day"
    slow = [record(n, NOON + n / 1e3) for n in range(6)]  # each takes 9 ms
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "1.jsonl").write_bytes(b"".join(lines([*slow, record(6, NOON + 1)], "farhop/fleet", None)))
    said = refused(tmp_path / "slow", "eu-only", "", "", {"concurrency": 4})
    assert said == "would have refused 2 of the 7 requests of the last day: 2 by requests at once"
    assert "would have refused 0 of the 21" in refused(tmp_path, "eu-only", "", "", {"tokens_per_day": 10_000})
    assert "holds no usage" in refused(tmp_path, "nobody", "", "", {"tokens_per_day": 1})
    dry = (*SET, "--home", "virginia", "--requests-per-minute", "10", "--key", "k", "--dry-run", "--usage", tmp_path)
    assert "would have refused 7 of the 20" in cli.run(*map(str, dry)).stdout
    assert "--dry-run" in cli.failed(cli.run(*SET, "--requests-per-minute", "1", "--usage", str(tmp_path)), 2)


def test_a_limit_of_each_user_stands_beside_that_of_all(cli, stands):
    cli.run(*SET, "--home", "virginia", "--requests-per-minute", "600")
    said = cli.run(*SET, "--each-user", "--requests-per-minute", "20").stdout
    assert said.splitlines()[0] == "tenant eu-only, user each: 20 requests per minute; lent out by virginia"
    assert [(limit.each_user, limit.requests_per_minute) for limit in limits.decode(stands.get(KEY)).limits] == [
        (False, 600), (True, 20)
    ]  # fmt: skip
    assert cli.run("limit", "unset", "eu-only", "--each-user").exit_code == 0
    assert len(limits.decode(stands.get(KEY)).limits) == 1


BOOK = """
epochs:
- {epoch: 1, since: 2020-01-01T00:00:00Z, models: {llama: {input: 1.0, output: 4.0}}}
"""


@pytest.fixture
def book(tmp_path):
    (tmp_path / "prices.yaml").write_text(BOOK)
    return tmp_path / "prices.yaml"


def test_a_budget_is_told_in_usd_and_held_in_whole_microdollars(cli, stands):
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
    said = cli.run(*SET, "--usd-per-day", "0.1")
    assert said.exit_code == 0
    assert "requests for m will be refused: no price" in said.stderr, "m is served"
    assert "contradicts" in cli.failed(cli.run(*SET, "--model", "llama", "--usd-per-month", "3"), 1)


def test_money_is_not_limited_where_nobody_can_count_it(cli, stands, book):
    asked = (*SET, "--home", "virginia", "--usd-per-day", "50")
    assert "usage.prices" in cli.failed(cli.run(*asked), 2), "the balancers have no price book"
    stands.prices = {"epoch": 1, "models": ["llama"], "more": False}
    assert '--model: "other" has no price at virginia' in cli.failed(cli.run(*asked, "--model", "other"), 2)
    stands.prices = {"epoch": 1, "models": ["*"], "more": False}
    assert cli.run(*asked, "--model", "other", "--dry-run").exit_code == 0
    stands.silent = True
    assert "--prices" in cli.failed(cli.run(*asked), 2)
    assert '"other" has no price at --prices' in cli.failed(
        cli.run(*asked, "--model", "other", "--prices", str(book)), 2
    )
    assert cli.run(*asked, "--prices", str(book)).exit_code == 0
    assert "cannot be read" in cli.failed(cli.run(*asked, "--prices", "/nowhere"), 2)
    assert "--usd-per-day: 1.5e-06" in cli.failed(cli.run(*SET, "--usd-per-day", "0.0000015"), 2)
    for bad in ("nan", "0", "2000000", "fifty"):
        said = cli.run(*SET, "--usd-per-day", bad)
        assert (said.exit_code, "--usd-per-day" in said.stderr) == (2, True)


def test_a_dry_run_says_what_a_budget_would_have_refused(cli, stands, tmp_path, book):
    made = [record(n, NOON + n) for n in range(20)]  # each cost 90 + 40 microdollars
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines(made, "farhop/fleet", price_book(book))))
    prices = price_book(book)
    assert refused(tmp_path, "eu-only", "", "", {"micro_usd_per_day": 1300}, prices=prices) == (
        "would have refused 10 of the 20 requests of the last day: 10 by USD per day"
    )
    stands.prices = {"epoch": 1, "models": ["*"], "more": False}
    asked = (*SET, "--home", "virginia", "--usd-per-day", "0.0013", "--dry-run", "--usage", str(tmp_path))
    assert "10 by USD per day" in cli.run(*asked, "--prices", str(book)).stdout
    assert "give --prices" in cli.failed(cli.run(*asked), 2)
    book.write_text(BOOK.replace("llama", "other"))
    said = refused(tmp_path, "eu-only", "", "", {"micro_usd_per_day": 1300}, prices=price_book(book))
    assert said == "would have refused 20 of the 20 requests of the last day: 20 for want of a price"
