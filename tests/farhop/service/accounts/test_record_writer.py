"""Usage through both tiers: each request once, where the law lets its records be, whatever becomes of the disk."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from inprocess import MODEL, Both, Engine, both, chat, global_config, head, send, streaming, tenant, topology, until
from msgspec.structs import replace
from pydantic import ValidationError

from farhop.accounts import segments
from farhop.accounts.audit import AuditLog, Decided, Files
from farhop.accounts.usage import CloudEvent, Reading
from farhop.config import ConfigError, problems_of
from farhop.service.authentication.authenticator import Caller
from topology.law import Law
from topology.model import Rule


def residency(logging: list[str]) -> dict[str, Any]:
    return {"residency": {"processing": {"allow": ["world"]}, "logging": {"allow": logging}}}


@asynccontextmanager
async def up(engine: Engine, folder: Path, **usage: Any) -> AsyncIterator[Both]:
    world = topology(tenant("noted-here", **residency(["us"])), tenant("noted-in-japan", **residency(["jp"])))
    given = {"usage": {"dir": str(folder), "sync": "never", **usage}}
    async with both(engine, world, regional=given, global_=given) as running:
        yield running


def events(folder: Path) -> list[CloudEvent]:
    return sorted(Reading().events(line for _, line in segments.read(folder)), key=lambda one: one.time)


async def test_each_request_once_by_the_one_its_client_came_to(engine: Engine, tmp_path: Path) -> None:
    async with up(engine, tmp_path) as running:
        whole = await send(running.entry, chat("sk-farhop-noted-here"))
        stream = await send(running.entry, chat("sk-farhop-noted-here", streaming()))
        wrong = await send(running.entry, chat("sk-farhop-noted-here", b"{"))
        unknown = await send(running.entry, chat("sk-nobody"))
        below = await send(running.client, chat("sk-farhop-noted-here"))
        muted = await send(running.entry, chat("sk-farhop-noted-in-japan"))
        engine.behaviour = "die"
        died = await send(running.entry, chat("sk-farhop-noted-here", streaming()))
        await running.at_rest()
        status = running.global_.tier_admin.status()["accounts"]["usage"]
    assert [a.status for a in (whole, stream, wrong, unknown, below, muted)] == [200, 200, 400, 401, 200, 200]
    found = events(tmp_path)
    by_decision = {one.id.rpartition("-")[0]: one for one in found}
    assert len(found) == len(by_decision) == 5
    for answer in (whole, stream, below):
        result = by_decision[answer.headers["x-farhop-decision"]]
        assert result.subject == result.data.tenant == "noted-here"
        data = result.data
        assert (data.input_tokens, data.cached_tokens, data.output_tokens, data.measured) == (11, 0, 3, "engine")
        assert (data.region, data.entry_region, data.status, data.model) == ("virginia", "virginia", 200, MODEL)
        assert data.gpu_ms is not None
        assert data.gpu_ms > 0
    cut = by_decision[died.headers["x-farhop-decision"]].data
    assert (cut.measured, cut.output_tokens, cut.outcome) == ("none", None, "upstream_died_mid_stream")
    assert status["withheld_by_law"] == 1
    assert status["trouble"] is None


async def test_where_the_entry_may_not_write_the_region_does(engine: Engine, tmp_path: Path) -> None:
    """Both know one id for it, and the region tells what it served."""
    async with up(engine, tmp_path) as running:
        regional = running.regional
        assert regional.accounts is not None
        assert running.global_.accounts is not None
        running.global_.accounts.region = "tokyo"  # as if it were there
        verify = regional.listeners.hop_authenticator.caller

        def from_tokyo(head: Any) -> Any:
            caller = verify(head)
            return replace(caller, entry_region="tokyo") if isinstance(caller, Caller) else caller

        regional.listeners.hop_authenticator.caller = from_tokyo  # type: ignore[method-assign]
        answer = await send(running.entry, chat("sk-farhop-noted-here", streaming()))
        await running.at_rest()
    (found,) = events(tmp_path)
    assert found.id == f"{answer.headers['x-farhop-decision']}-1"
    assert (found.data.region, found.data.entry_region, found.data.output_tokens) == ("virginia", "tokyo", 3)
    assert {path.parent.name for path, _ in segments.read(tmp_path)} == {"r1"}


async def test_what_a_models_rule_keeps_from_here_is_not_written_down_where_it_is_turned_away(
    engine: Engine, tmp_path: Path
) -> None:
    world = topology(tenant("by-model", models={MODEL: {"allow": ["jp"]}}))
    given = {"usage": {"dir": str(tmp_path), "sync": "never"}}
    async with both(engine, world, regional=given, global_=given) as running:
        answer = await send(running.entry, chat("sk-farhop-by-model", path="/v1/route"))
        assert (answer.status, answer.code) == (503, "no_region_serving")
        other = await send(running.entry, chat("sk-farhop-by-model", {"model": "other", "messages": []}))
        assert other.status == 400
        await running.at_rest()
        assert running.global_.tier_admin.status()["accounts"]["usage"]["withheld_by_law"] == 1
    (found,) = events(tmp_path)
    assert found.id.startswith(f"{other.headers.get('x-farhop-decision', '')}")
    assert found.data.status == 400


async def test_what_a_models_rule_keeps_from_the_receivers_region_does_not_leave_where_it_is_turned_away(
    engine: Engine, tmp_path: Path
) -> None:
    """Of a request on a path that cannot ask for the model that its name stands for, as of one that is served."""
    world = topology(tenant("by-model", models={"auto": {"deny": ["jp"]}}))
    receiver = {"url": "http://127.0.0.1:9/", "region": "tokyo", "insecure": True}
    given = {
        "usage": {"dir": str(tmp_path), "sync": "never", "http": receiver},
        "routes": [{"model": "auto", "models": [{"model": MODEL}]}],
    }
    async with both(engine, world, global_=given) as running:
        served = await send(running.entry, chat("sk-farhop-by-model", streaming() | {"model": "auto"}))
        refused = [
            await send(running.entry, chat("sk-farhop-by-model", {"text_input": "hi"}, f"/v2/models/{model}/generate"))
            for model in ("auto", "other")
        ]
        assert [answer.status for answer in (served, *refused)] == [200, 400, 404]
        await running.at_rest()
    found = [(one.data.status, one.farhopstays, one.data.model) for one in events(tmp_path)]
    # The model of a refusal, too: by it a later law is asked before the record leaves.
    assert found == [(200, True, MODEL), (400, True, "auto"), (404, False, "other")]


async def test_a_decision_that_was_asked_for_is_no_request_beside_the_one_that_follows_it(
    engine: Engine, tmp_path: Path
) -> None:
    async with up(engine, tmp_path) as running:
        assert (await send(running.entry, chat("sk-farhop-noted-here", path="/v1/route"))).status == 200
        assert (await send(running.client, chat("sk-farhop-noted-here"))).status == 200
        await running.at_rest()
    assert [one.data.outcome for one in events(tmp_path)] == ["served"]


async def test_a_later_rule_about_the_name_keeps_the_request_from_being_written_down(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited: list[Any] = []
    monkeypatch.setattr(AuditLog, "put", lambda _self, entry: audited.append(entry))
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    given = {
        "usage": {"dir": str(tmp_path / "usage"), "sync": "never"},
        "audit": {"dir": str(tmp_path / "audit"), "key": f"file:{tmp_path / 'key'}"},
        "routes": [{"model": "auto", "models": [{"model": MODEL}]}],
    }  # fmt: skip
    engine.behaviour = "pause"
    async with both(engine, topology(), global_=given) as running:
        asked = asyncio.create_task(send(running.entry, chat(body=streaming() | {"model": "auto"})))
        await until(lambda: engine.seen)
        law = running.global_.flow.law
        world = replaced(law.topology, epoch=law.epoch + 1, models={"auto": Rule(("world",), ("us",))})
        running.global_.laws.adopt(Law(world))
        engine.release.set()
        assert (await asked).status == 200
        await running.at_rest()
    assert [one.tenant for one in audited if isinstance(one, Decided)] == [""]
    assert events(tmp_path / "usage") == []


@pytest.mark.parametrize("on_full", ["serve", "refuse"])
async def test_requests_are_refused_while_usage_records_cannot_be_written(
    engine: Engine, tmp_path: Path, on_full: str
) -> None:
    async with up(engine, tmp_path, on_full=on_full) as running:
        assert running.global_.accounts is not None
        files = running.global_.accounts.usage
        assert files is not None
        files.bounds.bytes_max = 0
        first = await send(running.entry, chat("sk-farhop-noted-here"))
        await until(lambda: files.trouble)
        answer = await send(running.entry, chat("sk-farhop-noted-here"))
        text = running.global_.metrics.render().decode()
        found = running.global_.tier_admin.status()["accounts"]["usage"]
        assert "bytes_max" in found["trouble"]
        assert 'farhop_usage_trouble{part="files",region="virginia",tier="global"} 1.0' in text
        files.bounds.bytes_max = 1 << 20
        await until(lambda: not files.trouble)
        again = await send(running.entry, chat("sk-farhop-noted-here"))
        await running.at_rest()
    assert (first.status, again.status) == (200, 200)
    if on_full == "refuse":
        assert (answer.status, answer.code) == (503, "accounts_not_writable")
    else:
        assert answer.status == 200
    assert len(events(tmp_path)) == (2 if on_full == "refuse" else 3)  # waiting records were written


@pytest.mark.parametrize(
    ("usage", "says"),
    [
        ({}, "usage.dir"),
        ({"dir": "/x", "on_full": "wait"}, "on_full"),
        ({"dir": "/x", "prices": "/nowhere.yaml"}, "give the path of a price book"),
        ({"dir": "/x", "http": {"url": "http://meter.example/api"}}, "give an https URL"),
        ({"dir": "/x", "http": {"url": "https://user:word@meter.example/api"}}, "give a secret as `token`"),
        ({"dir": "/x", "segment_bytes": 1 << 20, "bytes_max": 65_536}, "lower it"),
    ],
)
def test_bad_configuration_names_field_and_remedy(usage: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        global_config(usage=usage)
    assert says in "\n".join(problems_of(error.value))


async def test_a_folder_that_cannot_be_written_stops_the_start(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"usage\.dir"):
        async with up(engine, tmp_path / "file"):
            await asyncio.sleep(0)


async def test_decisions_are_in_the_audit_log_of_each_tier(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served and refused, under which epoch and where they might have gone; of whom the law mutes, not who."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    key = Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    given = {"audit": {"dir": str(tmp_path), "key": f"file:{tmp_path / 'key'}", "on_full": "refuse"}}
    world = topology(
        tenant("noted-in-japan", **residency(["jp"])), tenant("by-model", models={MODEL: {"allow": ["jp"]}})
    )
    async with both(engine, world, regional=given, global_=given) as running:
        served = await send(running.entry, chat("sk-farhop-anywhere"))
        muted = await send(running.entry, chat("sk-farhop-noted-in-japan"))
        by_model = await send(running.entry, chat("sk-farhop-by-model"))
        refused = await send(running.entry, chat("sk-farhop-anywhere", x_farhop_allow="jp"))
        await running.at_rest()
        await send(running.global_admin, head("POST", "/log-level", content_length="16") + b'{"level":"info"}')
        assert running.global_.accounts is not None
        log = running.global_.accounts.audit
        assert log is not None
        with monkeypatch.context() as patch:
            patch.setattr(log, "_take", full)
            await until(lambda: log.trouble)
            assert (await send(running.entry, chat())).code == "accounts_not_writable"
            result = running.global_.tier_admin.status()["accounts"]["audit"]
            assert "No space left" in result["trouble"]
        await until(lambda: not log.trouble)
    found = dict[str, dict[str, Any]]()
    for tier in ("g1", "r1"):
        files = Files(tmp_path / "virginia" / tier, f"farhop.internal/fleet/virginia/{tier}", key.public_key())
        checkpoint, beside = files.verify()
        assert beside == []
        entries = [json.loads(one) for one in files.entries(checkpoint.size)]
        found[tier] = {one.get("id") or one["kind"]: one for one in entries}
        assert {"start", "law", "stop"} <= {one["kind"] for one in entries}
    above, below = (found[tier][served.headers["x-farhop-decision"]] for tier in ("g1", "r1"))
    assert (above["served"], above["why"], above["epoch"], below["epoch"]) == ("virginia", "served", 1, 1)
    assert above["lawful"] == ["frankfurt", "tokyo", "virginia"] == below["lawful"]
    assert {"tenant", "key"} <= above.keys()
    for nobody in (muted, by_model):  # a key shows its owner
        assert {"tenant", "key"}.isdisjoint(found["g1"][nobody.headers["x-farhop-decision"]])
    no = found["g1"][refused.headers["x-farhop-decision"]]
    assert (no["served"], no["status"], no["lawful"]) == ("", refused.status, ["tokyo"])
    assert found["g1"]["operator"]["what"] == "/log-level"


def test_an_audit_key_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(ValidationError) as error:
        global_config(audit={"dir": "/x", "key": f"file:{tmp_path / 'key'}"})
    assert "openssl genpkey" in "\n".join(problems_of(error.value))
