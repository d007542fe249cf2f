"""What a bundle withholds: no value of a secret field gets through, and all else does."""

import json
import re
import tarfile
from typing import get_args

import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from entry_dns.app.config import DnsConfig
from farhop_cli import bundle
from global_lb.app.config import GlobalConfig
from regional_lb.app.config import RegionalConfig

PLACES = (
    "token", "password", "secret", "private", "api_key", "hop", "keys", "key", "authorization", "sha256", "hop_secret",
    "admin_token", "Cookie", "credentials", "bearer", "user_salt",
)  # fmt: skip
PLAIN = ("region", "instance", "url", "wait_ms", "policy", "tokenizer", "file")
SECRET = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=6, max_size=30).map(
    lambda text: f"s3{text}cr3t"
)


def trees(leaf, names):
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=8
    )


@given(
    secret=SECRET,
    inside=st.data(),
    around=trees(st.integers() | st.just("told"), st.sampled_from(PLAIN)),
    place=st.sampled_from(PLACES),
)
def test_secrets_are_not_shown(secret, inside, around, place):
    held = inside.draw(trees(st.just(secret), st.sampled_from((*PLAIN, *PLACES))))
    document = {"around": around, "part": {"deeper": [{place: held}]}}
    for text in (json.dumps(bundle.withheld(document)), yaml.safe_dump(bundle.withheld(document), allow_unicode=True)):
        assert secret not in text
    assert bundle.withheld(document)["around"] == around


@given(secret=SECRET.map(str.encode), before=st.binary(max_size=50), after=st.binary(max_size=50))
def test_a_secret_that_is_known_is_nowhere(secret, before, after):
    assume(secret not in bundle.WITHHELD.encode())
    found = bundle.scrubbed(before + secret + after + secret, [secret, b"x"])
    assert secret not in found.replace(bundle.WITHHELD.encode(), b"")
    assert bundle.scrubbed(before, [b""]) == before


def test_path_of_a_secret_is_shown_and_a_login_in_a_url_is_not():
    fields = {
        "hop": {"keys": {"k1": "env:HOP"}, "active": "k1"}, "etcd": {"password": "file:/run/etcd"},
        "admin": {"tokens": {"ann": {"token": "hunter22", "may": "act"}}}, "tls": {"key_file": "a.key"},
        "proxies": {"tokyo": "http://user:hunter22@proxy:3128"}, "tokens_total": 5, "prefill_ms_per_token": 0.1,
    }  # fmt: skip
    found = bundle.withheld(fields)
    assert "hunter22" not in str(found)
    assert found["hop"]["keys"]["k1"] == "env:HOP"
    assert found["etcd"]["password"] == "file:/run/etcd"
    assert found["tls"]["key_file"] == "a.key"
    assert found["proxies"]["tokyo"] == "http://(withheld)@proxy:3128"
    assert (found["tokens_total"], found["prefill_ms_per_token"]) == (5, 0.1)
    assert bundle.withheld({"password": 12345678, "hop": {"keys": {"k": 5}}}) == {
        "password": bundle.WITHHELD, "hop": {"keys": {"k": bundle.WITHHELD}},
    }  # fmt: skip


def _secrets(part, found):
    """The names of all fields of a configuration that hold a secret, however deep."""
    for name, field in part.model_fields.items():
        for kind in _kinds(field.annotation, field.metadata):
            if kind is SecretStr:
                found.add(name)
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                _secrets(kind, found)
    return found


def _kinds(annotation, metadata=()):
    inner = get_args(annotation)
    return [annotation] if not inner else [kind for one in inner for kind in _kinds(one)]


def test_every_secret_of_a_configuration_is_withheld_by_its_name():
    names = _secrets(GlobalConfig, set()) | _secrets(RegionalConfig, set()) | _secrets(DnsConfig, set())
    assert {"user_salt", "password", "token"} <= names
    for name in names:
        document = {"part": {name: "0123456789abcdef"}, "parts": {name: {"one": ["0123456789abcdef"]}}}
        assert "0123456789abcdef" not in str(bundle.withheld(document)), name


async def test_a_balancers_name_is_not_used_as_a_path_and_replaces_no_other_file(world, cli, made, tmp_path):
    status = made.regional_status("r")
    for name in world.file.regions:
        for role in ("global_admin", "regional_admin"):
            world.status[name, role] = status | {"region": "../../etc", "instance": "/cron.d/\nx\x1b[2J" + 300 * "i"}
    ports = sorted(port for port, (_, role) in world.ports.items() if role.endswith("_admin"))[:3]
    asked = [word for port in ports for word in ("--admin", f"http://127.0.0.1:{port}")]
    result = await cli.in_thread("bundle", *asked, "--out", str(tmp_path / "b.tar.gz"))
    assert result.exit_code == 0, result.output
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        names = archive.getnames()
    shape = re.compile(r"b/([A-Za-z0-9_-][A-Za-z0-9._-]{0,210}/)?[a-z]+\.(json|txt)")
    assert [one for one in names if not shape.fullmatch(one)] == []
    assert sum(one.endswith("/status.json") for one in names) == len(ports), "none took another's place"


async def test_unreadable_file_is_reported_before_any_request(world, cli, tmp_path):
    for text, says in (("[", "is not YAML"), ("5", "must be a balancer's configuration")):
        (tmp_path / "own.yaml").write_text(text)
        words = ("--add", str(tmp_path / "own.yaml"), "--out", str(tmp_path / "b.tar.gz"))
        assert says in cli.failed(await cli.in_thread("bundle", *words), 2)
    words = ("--add", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "b.tar.gz"))
    assert "no such file" in cli.failed(await cli.in_thread("bundle", *words), 2)
    assert not (tmp_path / "b.tar.gz").exists()


async def test_a_balancer_that_does_not_answer_is_in_the_bundle_too(world, cli, made, tmp_path):
    for name in world.file.regions:
        world.status[name, "global_admin"] = made.global_status(tokyo="up")
        world.status[name, "regional_admin"] = made.regional_status("r")
    world.silent.add(("tokyo", "regional_admin"))
    result = await cli.in_thread("bundle", "--out", str(tmp_path / "b.tar.gz"))
    assert "5 of 6 balancers answered" in cli.failed(result, 3)
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
