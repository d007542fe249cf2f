"""What new limits would have done by usage files, and whether what they limit has a price, before they are set."""

import pytest

from farhop.accounts.prices import price_book
from farhop.accounts.usage import Record, lines
from farhop_cli.limit_effect import refused

SET = ("limit", "set", "eu-only", "--why", "contract", "--by", "ann")
BOOK = """
epochs:
- {epoch: 1, since: 2020-01-01T00:00:00Z, models: {llama: {input: 1.0, output: 4.0}}}
"""


@pytest.fixture
def book(tmp_path):
    (tmp_path / "prices.yaml").write_text(BOOK)
    return tmp_path / "prices.yaml"


NOON = 1_768_435_200.0


def record(n, at_s, key="k", region="tokyo", user=""):
    return Record(f"{n}-1", at_s, False, (
        "eu-only", key, "llama", "", region, "tokyo", 200, "served", False, "engine", 90, 0, 10, None, 0, 1, 9.0, None,
        100.0, 400, user,
    ))  # fmt: skip


def test_dry_run_shows_refusals_by_limits_of_each_user(cli, stands, tmp_path):
    made = [record(n, NOON + n / 1e3, user=user) for n, user in enumerate("aabaacaba")]  # 6, 2 and 1, of 9 ms each
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines(made, "farhop/fleet", None)))
    found = refused(tmp_path, "eu-only", "", "", {"requests_per_minute": 4}, each_user=True)
    assert found == "would have refused 2 of the 9 requests of the last day: 2 by requests per minute; of 1 of 3 users"
    found = refused(tmp_path, "eu-only", "", "", {"concurrency": 1}, each_user=True)
    assert found == "would have refused 6 of the 9 requests of the last day: 6 by requests at once; of 2 of 3 users"
    dry = (*SET, "--home", "virginia", "--requests-per-minute", "4", "--each-user", "--dry-run", "--usage", tmp_path)
    assert "of 1 of 3 users" in cli.run(*map(str, dry)).stdout
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines([record(n, NOON) for n in range(3)], "farhop/fleet", None)))
    assert "name no user" in refused(tmp_path, "eu-only", "", "", {"requests_per_minute": 4}, each_user=True)


def test_dry_run_shows_refusals_over_the_last_day(cli, stands, tmp_path):
    made = [record(n, NOON + n) for n in range(20)] + [record(98, NOON, "other"), record(99, NOON, region="")]
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines([record(97, NOON - 90_000), *made], "farhop/fleet", None)))
    assert refused(tmp_path, "eu-only", "k", "", {"requests_per_minute": 10}) == (
        "would have refused 7 of the 20 requests of the last day: 7 by requests per minute"
    ), "10 at once, and one more every 6 s"
    found = refused(tmp_path, "eu-only", "", "llama", {"requests_per_day": 100, "input_tokens_per_day": 900})
    assert found == "would have refused 11 of the 21 requests of the last day: 11 by input tokens per day"
    slow = [record(n, NOON + n / 1e3) for n in range(6)]  # each takes 9 ms
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "1.jsonl").write_bytes(b"".join(lines([*slow, record(6, NOON + 1)], "farhop/fleet", None)))
    found = refused(tmp_path / "slow", "eu-only", "", "", {"concurrency": 4})
    assert found == "would have refused 2 of the 7 requests of the last day: 2 by requests at once"
    assert "would have refused 0 of the 21" in refused(tmp_path, "eu-only", "", "", {"tokens_per_day": 10_000})
    assert "holds no usage" in refused(tmp_path, "nobody", "", "", {"tokens_per_day": 1})
    dry = (*SET, "--home", "virginia", "--requests-per-minute", "10", "--key", "k", "--dry-run", "--usage", tmp_path)
    assert "would have refused 7 of the 20" in cli.run(*map(str, dry)).stdout
    assert "--dry-run" in cli.failed(cli.run(*SET, "--requests-per-minute", "1", "--usage", str(tmp_path)), 2)


def test_money_is_not_limited_if_it_cannot_be_counted(cli, stands, book):
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
        output = cli.run(*SET, "--usd-per-day", bad)
        assert (output.exit_code, "--usd-per-day" in output.stderr) == (2, True)


def test_dry_run_shows_refusals_by_a_budget(cli, stands, tmp_path, book):
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
    found = refused(tmp_path, "eu-only", "", "", {"micro_usd_per_day": 1300}, prices=price_book(book))
    assert found == "would have refused 20 of the 20 requests of the last day: 20 for want of a price"
