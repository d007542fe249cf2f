from __future__ import annotations

import json

import pytest
import yaml

from farhop_lab.world.anycast_sites import Sites


@pytest.fixture
def sites(tmp_path):
    return Sites(tmp_path, {"drain_s": 3.0, "probe": {"url": "http://127.0.0.1:1/x"}})


def test_an_announcer_s_configuration_is_read_and_laid_over(sites, tmp_path, monkeypatch) -> None:
    from entry_anycast.app.config import AnycastConfig
    from farhop.config import load

    monkeypatch.setattr(sites.net, "farhop", lambda *words, **_: words)
    for site, speaker in (("a", "exabgp"), ("b", "bird")):
        sites.announce(site)
        config = load(AnycastConfig, tmp_path / f"{site}-anycast.yaml")
        assert getattr(config.speaker, speaker) is not None
        assert (config.drain_s, config.probe.url) == (3.0, "http://127.0.0.1:1/x")


def test_a_balancer_s_configuration_names_its_own_address(sites, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sites.net, "farhop", lambda *words, **_: words)
    sites.start_balancer("b")
    config = yaml.safe_load((tmp_path / "b-global.yaml").read_text())
    assert config["unicast"] == {"url": "http://10.77.2.2:8080", "anycast": ["192.0.2.1"]}


def test_states_of_announcers_are_one_line_even_if_one_is_silent(sites, monkeypatch) -> None:
    def run(*words: str) -> str:
        return json.dumps({"wanted": "announced", "actual": "", "why": "held"}) if sites.net.name("a") in words else ""

    monkeypatch.setattr("farhop_lab.world.anycast_net.run", run)
    sites.announcers = dict.fromkeys(("a", "b"))
    assert sites.describe() == "a: wanted 'announced', actual '', why 'held'; b: no answer"


def test_the_last_log_line_of_a_phase_counts(sites, tmp_path) -> None:
    lines = [
        {"event": "announcement", "phase": "draining", "timestamp": "2026-01-01T00:00:01Z"},
        {"event": "announcement", "phase": "draining", "timestamp": "2026-01-01T00:00:02Z"},
        {"event": "announcement", "phase": "withdrawn", "timestamp": "2026-01-01T00:00:03Z"},
    ]
    (tmp_path / "a-anycast.log").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert sites.phase_at("a", "withdrawn") - sites.phase_at("a", "draining") == 1.0
