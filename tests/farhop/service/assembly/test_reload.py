"""What of a file is taken while a process lives, and what awaits a restart. The rest: tests/flows/test_reload.py."""

from __future__ import annotations

from typing import Any

import pytest

from farhop.service.assembly.reload import LIVE, merged
from global_lb.app.config import GlobalConfig
from global_lb.app.main import LIVE as GLOBAL
from regional_lb.app.config import RegionalConfig
from regional_lb.app.main import LIVE as REGIONAL


def made(kind: type[Any], **more: Any) -> Any:
    document = {
        "region": "virginia", "instance": "one", "admin": {"port": 0},
        "hop": {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"}, **more,
    }  # fmt: skip
    return kind.model_validate(document)


def above(**more: Any) -> GlobalConfig:
    return made(GlobalConfig, **{"listen": {"port": 1}, **more})


def below(**more: Any) -> RegionalConfig:
    base = {"tier": {"port": 1}, "control": {"port": 2}, "replicas": [{"url": "http://127.0.0.1:1", "models": ["m"]}]}
    return made(RegionalConfig, **{**base, **more})


def test_live_fields_are_taken_and_the_others_are_named() -> None:
    running, wanted = above(), above(listen={"port": 2}, spill={"at": 0.8}, limits={"head_s": 3.0, "requests_max": 9})
    config, taken, waiting = merged(running, wanted, GLOBAL)
    assert (taken, waiting) == (["limits.head_s", "spill.at"], ["limits.requests_max", "listen.port"])
    assert (config.listen, config.limits.requests_max) == (running.listen, running.limits.requests_max)
    assert (config.spill, config.limits.head_s) == (wanted.spill, 3.0)
    assert merged(config, config, GLOBAL)[1:] == ([], [])


def test_a_field_that_refers_to_one_awaiting_a_restart_awaits_it_too() -> None:
    source = [{"kind": "file", "path": "replicas.yaml"}]
    wanted = below(discovery=source, replicas=[], policy={"name": "round-robin"})
    config, taken, waiting = merged(below(), wanted, REGIONAL)
    assert (taken, waiting) == (["policy.name"], ["discovery", "replicas"])
    assert len(config.replicas) == 1  # none would be left


def test_a_secret_that_changes_is_taken_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    running = above()
    monkeypatch.setenv("FARHOP_TEST_HOP", "z" * 32)
    config, taken, waiting = merged(running, above(), GLOBAL)
    assert (taken, waiting) == (["hop.keys.k1"], [])
    assert config.hop.secrets() == {"k1": b"z" * 32}


@pytest.mark.parametrize(("kind", "live"), [(GlobalConfig, GLOBAL), (RegionalConfig, REGIONAL)])
def test_live_names_are_fields_of_the_configuration(kind: type[Any], live: dict[str, tuple[str, ...]]) -> None:
    for name, beside in live.items():
        part, _, field = name.partition(".")
        assert all(one in kind.model_fields for one in (part, *beside))
        assert not field or field in kind.model_fields[part].annotation.model_fields
    assert live.keys() >= LIVE.keys()
