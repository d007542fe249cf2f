"""Lengths of time as options take them, and what the shell completes."""

import os

import pytest
import typer

from farhop_cli import options
from farhop_lab.world import world_file
from farhop_lab.world.world_file import RegionFile, WorldFile


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("1.5h", 5400)])
def test_durations_are_parsed_to_seconds(text, seconds):
    assert options.duration_s("--for", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1", "1w", "1h30m", "nan s", "9999999999s", "1e3s"])
def test_an_invalid_duration_names_its_option(text, capsys):
    with pytest.raises(typer.Exit):
        options.duration_s("--for", text)
    assert "--for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (10, "10s"), (90, "90s"), (1800, "30m"), (7200, "2h"), (86400, "1d")]
)
def test_duration_is_shown_as_given(seconds, text):
    assert options.duration(seconds) == text


def test_a_length_has_bounds(capsys):
    assert options.duration_s("--for", "1m", 30.0, 3600.0) == 60.0
    with pytest.raises(typer.Exit):
        options.duration_s("--for", "10s", 30.0, 3600.0)
    assert capsys.readouterr().err == "farhop: --for: give 30s to 1h\n"


def test_regions_of_the_running_world_are_completed(tmp_path, monkeypatch):
    monkeypatch.setenv(world_file.ENVIRONMENT, str(tmp_path / "world.json"))
    assert options.regions() == []
    urls = RegionFile("http://a:1", "http://a:2", "http://a:3")
    world_file.write(
        tmp_path / "world.json", WorldFile(os.getpid(), 1.0, "t", "e:1", "", "m", {}, {"tokyo": urls, "paris": urls})
    )
    assert options.regions() == ["tokyo", "paris"]
