"""`farhop bench` is wired: every subcommand has its own options alone, and none that it would ignore."""

import os
import signal

import pytest
import typer

from farhop_cli import measure
from farhop_cli.commands import bench

OPTIONS = {
    "decide": set(), "relay": {"quick", "only", "repeats", "streams", "tls"}, "soak": {"requests"},
    "ttft": {"quick", "rounds", "engine", "model", "tokenizer"}, "dns": {"seconds", "networks"},
    "picker": {"quick"}, "anycast": {"repeats"}, "upload": {"repeats"}, "hostile": {"quick"},
    "scrape": set(), "intake": set(), "hits": set(), "trie": {"quick"}, "sim": {"quick"},
    "routing": {"quick", "only", "seeds", "out", "markdown"}, "fidelity": {"scenario", "speedup", "quick"},
    "chaos": {"seeds", "seed", "workers", "out", "replay", "live", "length"}, "law": {"worlds", "first", "workers"},
    "resume": {"interruptions", "seed", "cost", "text", "kills"}, "console": {"seconds"}, "tenants": set(),
    "worlds": {"count", "kinds", "only", "seed", "seeds", "length", "traces", "workers", "out", "markdown"},
}  # fmt: skip


def test_each_benchmark_has_exactly_its_own_options():
    commands = typer.main.get_command(bench.app).commands
    assert {name: {one.name for one in made.params} - {"as_json"} for name, made in commands.items()} == OPTIONS
    assert all("as_json" in {one.name for one in made.params} for made in commands.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--live", "--seeds", "3"), "--seeds: it means nothing for --live"),
        (("--live", "--workers", "3"), "--workers: it means nothing for --live"),
        (("--live", "--out", "x"), "--out: it means nothing for --live"),
        (("--for", "1m"), "--for: it means nothing for a run in virtual time"),
        (("--replay", "a.yaml", "--seed", "3"), "--seed: it means nothing for --replay"),
        (("--live", "--for", "10s"), "--for: give 30s to 1d"),
    ],
)
def test_no_option_of_chaos_is_ignored(cli, arguments, message):
    assert message in cli.failed(cli.run("bench", "chaos", *arguments), 2)


@pytest.mark.parametrize("arguments", [("nonsense",), ("decide", "--quick"), ("law", "--seeds", "3")])
def test_an_unknown_benchmark_is_bad_usage(cli, arguments):
    assert cli.run("bench", *arguments).exit_code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_bench_ended_by_sigterm_cleans_up(cli, monkeypatch, number):
    """Its network namespaces and processes would stay."""
    cleaned, before = [], signal.signal(number, lambda *_: None)

    def told(_as_json):
        try:
            os.kill(os.getpid(), number)
            return 0
        finally:
            cleaned.append(number)

    monkeypatch.setattr(measure, "decide", told)
    try:
        assert cli.run("bench", "decide").exit_code != 0
        assert signal.getsignal(number).__name__ == "<lambda>"  # as it was
    finally:
        signal.signal(number, before)
    assert cleaned == [number]
