"""`farhop bench`: figures as a table or as JSON."""

import json

import pytest

from farhop_cli import bench
from farhop_lab.bench import Row


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(bench.BENCHES, "decide", lambda: [Row("global, 3 regions", 51.25, 49.0, 60.5)])


@pytest.mark.parametrize("arguments", [(), ("decide",)])
def test_a_table(cli, arguments):
    result = cli.run("bench", *arguments)
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if "3 regions" in line]
    assert row.split()[-3:] == ["51.2", "49.0", "60.5"]
    assert not result.stderr


def test_json_is_all_there_is(cli):
    told = json.loads(cli.run("bench", "decide", "--json").stdout)
    assert told["rows"] == [{"what": "global, 3 regions", "median_us": 51.25, "least_us": 49.0, "most_us": 60.5}]


def test_what_nobody_measures(cli):
    assert "there is decide" in cli.failed(cli.run("bench", "nonsense"), 2)
