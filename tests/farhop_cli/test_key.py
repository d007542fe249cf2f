"""`farhop key` against a real etcd: made and shown once, rotated with two live, revoked, listed without any secret."""

import json

import pytest

from farhop.identity.api_keys import digest, mistyped
from farhop.store.contract import KEY_PREFIX
from farhop.store.documents import issued_keys
from farhop.store.envelope import bare

WHY = ("--why", "test", "--by", "ann")


def output_of(cli, *words):
    result = cli.run("key", *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def kept(stands):
    found = (issued_keys.decode(bare(value)) for value in stands.all(KEY_PREFIX).values())
    return {one.id: one for one in found}


def test_a_key_from_its_making_to_its_end(cli, stands):
    made = output_of(
        cli, "create", "eu-only", "--model", "m", "--path", "/v1/embeddings", "--within", "eu", "--for", "90d", *WHY
    )
    (row,) = made["keys"]
    assert not mistyped(made["key"])
    one = kept(stands)[row["id"]]
    assert (one.sha256, one.tenant, one.models) == (digest(made["key"]), "eu-only", ("m",))
    assert (one.paths, one.within, (one.expires - one.at).days) == (("/v1/embeddings",), ("eu",), 90)
    assert made["key"].encode() not in b"".join(stands.all("/farhop/").values())

    rotated = output_of(cli, "rotate", one.id, "--grace", "2h", *WHY)
    new, old = (kept(stands)[row["id"]] for row in rotated["keys"])
    assert (new.models, new.replaces, new.sha256) == (one.models, one.id, digest(rotated["key"]))
    assert (old.expires - new.at).total_seconds() == 7200
    assert [row["state"] for row in rotated["keys"]] == ["valid", "valid"]
    assert f"{new.id} takes its place" in cli.failed(cli.run("key", "rotate", one.id, *WHY), 1)

    assert [row["state"] for row in output_of(cli, "revoke", one.id, *WHY)["keys"]] == ["revoked"]
    assert "revoked already" in cli.failed(cli.run("key", "revoke", one.id, *WHY), 1)
    rows = output_of(cli, "list", "--tenant", "eu-only")["keys"]
    assert {row["id"]: row["state"] for row in rows} == {one.id: "revoked", new.id: "valid"}
    assert output_of(cli, "list", "--tenant", "anywhere") == {"keys": []}
    shown = cli.run("key", "list").stdout
    assert new.id in shown
    assert rotated["key"] not in shown


def test_a_model_that_is_served_nowhere_is_reported(cli, stands):
    made = cli.run("key", "create", "eu-only", "--model", "m", "--model", "nosuch", *WHY)
    assert made.exit_code == 0
    assert made.stderr.splitlines()[:-1] == ['farhop: --model: no region serves "nosuch" now; there is m']


def test_balancers_of_both_tiers_are_counted(cli, stands):
    made = output_of(cli, "create", "eu-only", *WHY)
    assert (made["balancers"], made["aware"]) == (
        6,
        0,
    )  # three entries and three regions, which are fakes, and follow nothing


def test_a_key_that_may_see_receipts_keeps_the_right_when_it_is_rotated(cli, stands):
    (row,) = output_of(cli, "create", "eu-only", "--explain", *WHY)["keys"]
    rotated = output_of(cli, "rotate", row["id"], *WHY)
    assert all(kept(stands)[one["id"]].explain for one in rotated["keys"])
    assert "all that the tenant may, with receipts" in " ".join(cli.run("key", "list").stdout.split())


def test_a_dry_run_makes_nothing(cli, stands):
    output = cli.run("key", "create", "eu-only", "--dry-run", *WHY).stdout
    assert "nothing is written" in output
    assert "fh_" not in output
    assert kept(stands) == {}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("create", "nobody"), 2, "TENANT: 'nobody' is no tenant"),
        (("create", "eu-only", "--within", "mars"), 2, "--within: 'mars' is no place here"),
        (("create", "eu-only", "--for", "soon"), 2, "--for"),
        (("create", "eu-only", "--path", "v1"), 2, "--path: must begin with /"),
        (("create", "eu-only", "--model", ""), 2, "--model: must be 1 to 256"),
        (("revoke", "k1"), 1, "no key 'k1' was created"),
        (("rotate", "a/b"), 2, "no key's id"),
    ],
)
def test_error_is_reported_in_one_line(cli, stands, arguments, code, message):
    assert message.replace("'", '"') in cli.failed(cli.run("key", *arguments, *WHY), code).replace("'", '"')
    assert kept(stands) == {}
