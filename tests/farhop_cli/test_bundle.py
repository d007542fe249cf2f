"""What is withheld of a bundle: nothing that stands in the place of a secret gets through, and the rest does."""

import json

import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from farhop_cli import bundle

PLACES = (
    "token", "password", "secret", "private", "api_key", "hop", "keys", "key", "authorization", "sha256", "hop_secret",
    "admin_token", "Cookie", "credentials", "bearer",
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
def test_no_byte_of_a_secret_is_shown(secret, inside, around, place):
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


def test_where_a_secret_stands_is_shown_and_a_login_in_a_url_is_not():
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


async def test_what_cannot_be_added_is_named_before_anything_is_asked(world, cli, tmp_path):
    for text, says in (("[", "is not YAML"), ("5", "must be a balancer's configuration")):
        (tmp_path / "own.yaml").write_text(text)
        words = ("--add", str(tmp_path / "own.yaml"), "--out", str(tmp_path / "b.tar.gz"))
        assert says in cli.failed(await cli.in_thread("bundle", *words), 2)
    words = ("--add", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "b.tar.gz"))
    assert "no such file" in cli.failed(await cli.in_thread("bundle", *words), 2)
    assert not (tmp_path / "b.tar.gz").exists()


async def test_who_does_not_answer_is_in_it_too(world, cli, made, tmp_path):
    for name in world.file.regions:
        world.status[name, "global_admin"] = made.global_status(tokyo="up")
        world.status[name, "regional_admin"] = made.regional_status("r")
    world.silent.add(("tokyo", "regional_admin"))
    result = await cli.in_thread("bundle", "--out", str(tmp_path / "b.tar.gz"))
    assert "5 of 6 balancers answered" in cli.failed(result, 3)
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
