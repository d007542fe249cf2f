"""Operators' commands over a fleet at work: etcd with mutual TLS, both tiers with TLS and tokens on their admin ports.

The balancers are found in etcd; nothing of `farhop up` is there.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from inprocess import HOP_KEY, MODEL, Both, Engine, chat, global_config, regional_config, send, tenant, topology, until
from typer.testing import CliRunner, Result

from farhop.store.contract import ENTRY_PREFIX
from farhop.store.etcd import EtcdStore
from farhop_cli.drill_fleet import SHIPPED
from farhop_cli.main import app
from farhop_lab.world import world_file
from farhop_lab.world.certs import Authority
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from global_lb.app.main import GlobalBalancer
from regional_lb.app.main import RegionalBalancer
from topology import load as topologies
from topology.model import Topology

READS, ACTS = "r" * 32, "a" * 32
WORLD = topology(tenant("acme"))


@dataclass
class Fleet:
    """What runs, and what a laptop needs to know of it."""

    running: Both
    etcd: EmbeddedEtcd
    authority: Authority
    folder: Path
    extra: list[Any] = field(default_factory=list)

    async def cli(self, *words: str, code: int = 0) -> Result:
        """A command in a thread: it brings its own event loop, and the balancers need this one."""
        result = await asyncio.to_thread(CliRunner().invoke, app(), list(words))
        assert result.exit_code == code, result.output
        return result


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    async with fleet_of(WORLD, tmp_path, monkeypatch) as made:
        yield made


@asynccontextmanager
async def fleet_of(
    world: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: int | None = None
) -> AsyncIterator[Fleet]:
    """Both tiers in Virginia. `entry`: the port where clients come, by TLS then."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    monkeypatch.setenv("FARHOP_READS", READS)
    monkeypatch.setenv("FARHOP_ACTS", ACTS)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(world_file.ENVIRONMENT, raising=False)
    monkeypatch.chdir(tmp_path)
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    files = {"cert-file": server.cert_file, "key-file": server.key_file, "trusted-ca-file": authority.ca_file}
    flags = ("--client-cert-auth", *(f"--{flag}={name}" for flag, name in files.items()))
    tls = {"ca_file": authority.ca_file, "cert_file": client.cert_file, "key_file": client.key_file}

    def admin(tier: str) -> dict[str, Any]:
        pair = authority.issue(tier, (f"virginia.{tier}.farhop.internal", "127.0.0.1"))
        tokens = {"look": {"token": "env:FARHOP_READS"}, "do": {"token": "env:FARHOP_ACTS", "may": "act"}}
        return {"port": 0, "tls": {"cert_file": pair.cert_file, "key_file": pair.key_file}, "tokens": tokens}

    async with EmbeddedEtcd(scheme="https", extra=flags) as etcd, Engine().running() as engine:
        etcd_config = {"endpoints": [etcd.endpoint], **tls}
        below = regional_config(engine, admin=admin("regional"), etcd=etcd_config)
        public = authority.issue("entry")
        pair = {"cert_file": public.cert_file, "key_file": public.key_file}
        listen = {"listen": {"port": entry, "tls": pair}} if entry is not None else {}
        # Both share one loop with everything else: if it stands still, a ping with a shorter timeout reports "channel
        # broken" for a region that is well, and no drill may start.
        patient = {"ping_timeout_s": 10.0}
        above = global_config(admin=admin("global"), etcd=etcd_config, watch=patient, **listen)
        regional = RegionalBalancer(below, world, Random(1))
        global_ = GlobalBalancer(above, world, Random(2))
        try:
            lines = (await regional.open(), await global_.open())
            await until(global_.tier_admin.ready)
            made = Fleet(Both(regional, global_, lines), etcd, authority, tmp_path)
            await _listed(etcd.endpoint, tls)
            words = ["--etcd", etcd.endpoint, "--etcd-ca", tls["ca_file"], "--etcd-cert", tls["cert_file"]]
            words += ["--etcd-key", tls["key_file"], "--ca", authority.ca_file, "--token", "env:FARHOP_READS"]
            await made.cli("context", "set", "prod", *words)
            yield made
        finally:
            await global_.close()
            await regional.close()


async def _listed(endpoint: str, tls: dict[str, str]) -> None:
    """Until the global balancer says in etcd that it is there."""
    from farhop.service.config.endpoints import Etcd

    store = EtcdStore(Etcd.model_validate({"endpoints": [endpoint], **tls}).settings(()), Random(9))
    await store.open()
    async with asyncio.timeout(60.0):
        while not await store.list(ENTRY_PREFIX):
            await asyncio.sleep(0.02)
    await store.close()


async def test_every_command_works_from_a_laptop(fleet: Fleet) -> None:
    printed = json.loads((await fleet.cli("status", "--json")).stdout)
    assert (printed["summary"]["answered"], printed["summary"]["balancers"], printed["unreachable"]) == (2, 2, [])
    assert printed["summary"]["epochs"] == {str(fleet.running.global_.flow.law.epoch): ["virginia", "virginia"]}
    text = (await fleet.cli("status", "--wide")).stdout
    assert "context prod" in text
    assert "one" in text  # the replica
    # Set, seen by those that follow it, explained, looked up later, and unset.
    output = await fleet.cli("drain", "set", "virginia", "--why", "test", "--by", "ann", "--over", "0s", "--force")
    assert "1 of 1 balancers follow it" in output.stdout
    assert "virginia is drained by ann: test" in (await fleet.cli("status")).stdout
    assert "ann" in (await fleet.cli("drain", "history")).stdout
    await fleet.cli("undrain", "virginia")
    output = await fleet.cli("policy", "set", "virginia", "least-load", "--why", "test", "--by", "ann")
    assert "1 of 1 balancers follow it" in output.stdout
    await fleet.cli("law", "get")
    (fleet.folder / "request.json").write_text(
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    )
    now = json.loads((await fleet.cli("explain", "request.json", "--tenant", "acme", "--json")).stdout)
    assert (now["entry_region"], now["regional"]["reasons"]["chosen"]) == ("virginia", "one")
    served = await send(fleet.running.entry, chat("sk-farhop-acme"))
    past = json.loads((await fleet.cli("explain", served.headers["x-farhop-decision"], "--json")).stdout)
    assert set(past["global"]) == set(past["regional"]) == {"virginia"}
    await fleet.cli("status", "--region", "virginia", "--replicas")
    assert "is no region" in (await fleet.cli("status", "--region", "atlantis", code=2)).stderr


async def test_read_right_does_not_allow_actions(fleet: Fleet) -> None:
    output = await fleet.cli("log-level", "info", code=2)
    assert "may read here, and this needs the right to act" in output.stderr
    await fleet.cli("context", "set", "prod", "--token", "env:FARHOP_ACTS")
    assert "global virginia/g1" in (await fleet.cli("log-level", "info")).stdout
    await fleet.cli("context", "set", "wrong", "--admin", _url(fleet, "global"), "--ca", fleet.authority.ca_file,
                    "--token", "env:FARHOP_TEST_HOP")  # fmt: skip
    assert (
        "refuses us: this admin port asks who comes" in (await fleet.cli("status", "--context", "wrong", code=2)).stderr
    )


def _url(fleet: Fleet, tier: str) -> str:
    port = fleet.running.global_admin if tier == "global" else fleet.running.regional_admin
    return f"https://127.0.0.1:{port}"


async def test_unreachable_balancers_are_named_with_the_failure(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.running.regional.admin.close()  # one of two
    output = await fleet.cli("status", code=3)
    assert (
        f"1 of 2 balancers answered: {_url(fleet, 'regional')} cannot be reached: connection refused" in output.stderr
    )
    assert "wrong: not reached" in output.stdout
    assert "could not be asked" in (await fleet.cli("explain", "0" * 16, code=3)).stderr
    await fleet.running.global_.admin.close()
    output = await fleet.cli("status", code=2)
    assert _url(fleet, "global") in output.stderr
    await fleet.etcd.stop()
    output = await fleet.cli("status", code=2)
    assert f"context prod cannot be reached: etcd: etcd at {fleet.etcd.endpoint}" in output.stderr
    assert output.stderr.count("\n") == 1


async def test_an_impostor_registered_in_etcd_gets_no_token(fleet: Fleet) -> None:
    """A certificate of the right authority with another name, and, without an authority to go by, anybody."""
    await fleet.cli("context", "set", "prod", "--server-name", "{region}.{tier}.elsewhere")
    output = await fleet.cli("status", code=2)
    assert "is not trusted" in output.stderr
    await fleet.cli("context", "set", "blind", *_etcd_words(fleet), "--token", "env:FARHOP_READS")
    output = await fleet.cli("status", "--context", "blind", code=2)
    assert "was not asked: it was found in etcd and nothing proves it" in output.stderr


def _etcd_words(fleet: Fleet) -> list[str]:
    pair = fleet.folder / "client"
    return ["--etcd", fleet.etcd.endpoint, "--etcd-ca", fleet.authority.ca_file, "--etcd-cert", f"{pair}.crt",
            "--etcd-key", f"{pair}.key"]  # fmt: skip


async def test_a_bundle_holds_what_a_report_needs_and_no_secret(fleet: Fleet) -> None:
    await send(fleet.running.entry, chat("sk-farhop-acme", body={
        "model": MODEL, "messages": [{"role": "user", "content": "xyzzy-plugh"}], "max_tokens": 4,
    }))  # fmt: skip
    own = "hop: {keys: {k1: plain-hop-key-in-a-file}}  # and-a-comment\netcd: {password: hunter2}\n"
    (fleet.folder / "own.yaml").write_text(own)
    made = json.loads((await fleet.cli("bundle", "--out", "b.tar.gz", "--add", "own.yaml", "--json")).stdout)
    assert made["unreachable"] == []
    with tarfile.open(fileobj=io.BytesIO((fleet.folder / "b.tar.gz").read_bytes())) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive.getmembers()}  # type: ignore[union-attr]
    names = {name.partition("/")[2] for name in files}
    kinds = ("config.json", "decisions.json", "law.json", "metrics.txt", "status.json")
    folders = ("global-virginia-g1", "regional-virginia-r1")
    assert names == {
        "about.json", "summary.txt", "added/1-own.yaml.yaml",
        *(f"{folder}/{kind}" for folder in folders for kind in kinds),
    }  # fmt: skip
    text = b"".join(files.values())
    secrets = (READS, ACTS, HOP_KEY, "plain-hop-key", "hunter2", "and-a-comment", "xyzzy", "sk-farhop-acme")
    hashes = [key.sha256 for one in WORLD.tenants.values() for key in one.keys]
    for secret in (*secrets, *hashes):
        assert secret.encode() not in text, secret
    assert b'"tenant": "acme"' in files["b/global-virginia-g1/decisions.json"]
    assert json.loads(files["b/about.json"])["balancers"][0]["version"]
    assert json.loads(files["b/global-virginia-g1/config.json"])["region"] == "virginia"
    assert "not written over" in (await fleet.cli("bundle", "--out", "b.tar.gz", code=2)).stderr


def of_virginia(entry: int) -> Topology:
    """A world of one region, whose entry has TLS."""
    path = topologies.shipped("three-regions")
    document = topologies.document(path.read_text(), str(path))
    virginia = next(one for one in document["regions"] if one["name"] == "virginia")
    document |= {"regions": [{**virginia, "entry": [f"https://127.0.0.1:{entry}"]}], "rtt_ms": {}}
    document["tenants"] = [tenant("acme")]
    return topologies.parse(json.dumps(document), "test")


async def process(*words: str, code: int = 0) -> str:
    """A command that listens for signals, which no thread may: what it printed."""
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "farhop_cli", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await made.communicate()
    assert made.returncode == code, (printed, errors)
    return printed.decode()


@pytest.mark.long
async def test_drills_run_from_a_laptop_on_a_fleet_with_certificates_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_KEY", "sk-farhop-acme")
    name, key = "law-change", ("--key", "acme=env:ACME_KEY")
    document = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    document |= {"before_s": 1, "after_s": 1, "parameters": {"region": "virginia", "soak_s": 1}}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    (port,) = free_ports(1)
    async with fleet_of(of_virginia(port), tmp_path, monkeypatch, port) as fleet:
        assert name in (await fleet.cli("drill", "list")).stdout
        text = await fleet.cli("drill", "check", f"{name}.yaml", "--keep", *key)
        assert "it may run now" in text.stdout
        ran = json.loads(await process("drill", "run", name, *key, "--json"))
        assert (ran["verdict"], ran["measures"]["requests_failed"]) == ("PASS", 0)
        assert ran["measures"]["canaries"] > 5
        assert ran["measures"]["law_followed_s"] > 0.0
        assert fleet.running.global_.flow.law.epoch == fleet.running.regional.flow.law.epoch == 2
        assert (await fleet.cli("drill", "report", "--of", name, "--verdict")).stdout.strip() == "PASS"
        assert ran["run"] in (await fleet.cli("drill", "history", "--json")).stdout
        await fleet.cli("drill", "schedule", name, "--window", "tue 10:00-12:00", "--every", "14d", *key)
        assert name in (await fleet.cli("drill", "schedule")).stdout
        ends = asyncio.create_task(process("drill", "run", name, *key, "--set", "soak_s=50", "--json", code=1))
        stop = CliRunner().invoke, app(), ["drill", "stop"]
        async with asyncio.timeout(30.0):
            while (await asyncio.to_thread(*stop)).exit_code:
                await asyncio.sleep(0.2)
        ran = json.loads(await ends)
        assert ran["verdict"] == "ABORTED"
        assert "stop" in ran["why"]
        await fleet.cli("drill", "stop", "--all", "--why", "test")
        text = await fleet.cli("drill", "check", name, *key, code=1)
        assert "engaged" in text.stdout
        await fleet.cli("drill", "stop", "--release")
