"""`farhop law` against a real etcd: checked before it is written, under an epoch above all, what was is kept."""

import json

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from farhop.store.contract import LAW_HISTORY_PREFIX, LAW_KEY, law_history_key
from farhop.store.envelope import Keys, bare, public_key
from farhop_cli import law as room
from topology import law_document
from topology.load import load, shipped

WORLD = load(shipped("three-regions"))
AT = "2026-05-01T12:00:00+00:00"


def law_of(stands):
    """The law that stands, read."""
    value = stands.get(LAW_KEY)
    return law_document.read(bare(value), WORLD, "etcd") if value is not None else None


def kept(stands):
    """The epochs of those that were."""
    return [int(key.rpartition("/")[2]) for key in stands.all(LAW_HISTORY_PREFIX)]


@pytest.fixture
def law(tmp_path):
    def write(*drop: str, **changes) -> str:
        found = law_document.document_of(WORLD)
        found["tenants"] = [one for one in found["tenants"] if one["name"] not in drop]
        path = tmp_path / "law.yaml"
        path.write_text(yaml.safe_dump({**found, **changes}))
        return str(path)

    return write


def test_shown_law_names_its_author_and_can_be_set_again(cli, stands, law, tmp_path):
    shown = cli.run("law", "get")
    assert shown.stdout.startswith("# law of epoch 1, of topology three-regions: etcd holds none\n")
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    same = cli.run("law", "set", str(tmp_path / "shown.yaml"), "--why", "as it is", "--by", "ann")
    assert (same.exit_code, same.stderr) == (0, "")
    assert "law of epoch 2 is set, by ann: as it is" in same.stdout
    assert "no change: the two laws are the same" in same.stdout
    assert "6 of 6 balancers follow it" in same.stdout
    held = law_of(stands)
    assert (held.epoch, held.author, held.why, held.tenants) == (2, "ann", "as it is", WORLD.tenants)
    shown = cli.run("law", "get").stdout
    assert "# law of epoch 2, from etcd (revision " in shown
    assert ": as it is\n" in shown
    assert yaml.safe_load(shown) == law_document.document_of(WORLD)
    # The topology's own, requested by its epoch, beside the law in etcd.
    assert cli.run("law", "get", "--epoch", "1").stdout.startswith("# law of epoch 1, of topology three-regions\n")


def test_changes_are_shown_and_the_former_law_is_kept(cli, stands, law):
    assert cli.run("law", "set", law(), "--why", "one").exit_code == 0
    newcomer = {"name": "acme", "residency": {"processing": {"allow": ["eu"]}}}
    tenants = [*law_document.document_of(WORLD)["tenants"][:2], newcomer]
    result = cli.run("law", "set", law(tenants=tenants, models={}), "--why", "two", "--json")
    output = json.loads(result.stdout)
    assert (output["epoch"], output["added"], output["removed"]) == (3, ["acme"], ["japan-only", "not-us"])
    assert (output["models"], output["balancers"], output["aware"]) == (["export-controlled-70b"], 6, 6)
    assert kept(stands) == [2]
    old = json.loads(cli.run("law", "get", "--epoch", "2", "--json").stdout)
    assert (old["epoch"], old["why"], len(old["tenants"])) == (2, "one", 4)
    history = json.loads(cli.run("law", "history", "--json").stdout)["law"]
    assert [(one["epoch"], one["why"], one["tenants"]) for one in history] == [(3, "two", 3), (2, "one", 4)]
    assert "two" in cli.run("law", "history").stdout
    assert "no law of epoch 9 is kept" in cli.failed(cli.run("law", "get", "--epoch", "9"), 1)
    removed = cli.run("law", "set", law("anywhere"), "--why", "three")
    assert "removed, and no longer served: acme, anywhere" in removed.stdout


def test_a_dry_run_reports_stranded_tenants_and_moved_traffic(cli, stands, law):
    stands.states["frankfurt"] = "down"
    tenants = law_document.document_of(WORLD)["tenants"]
    tenants[0]["residency"] = {"processing": {"allow": ["eu"]}}
    file = law(tenants=tenants)
    for command in (("law", "set", file, "--why", "x", "--dry-run"), ("law", "diff", file)):
        output = " ".join(cli.run(*command).stdout.split())
        assert "strands: anywhere (m), served in tokyo, virginia" in output
        assert "moves: anywhere: processing, logging, hints loses tokyo, virginia" in output
    assert json.loads(cli.run("law", "diff", file, "--json").stdout)["effects"]
    assert law_of(stands) is None


def test_only_the_last_former_laws_are_kept(cli, stands, law, monkeypatch):
    monkeypatch.setattr(room, "KEPT_MAX", 2)
    for n in range(4):
        assert cli.run("law", "set", law(), "--why", str(n)).exit_code == 0
    assert kept(stands) == [3, 4]


def test_every_fault_is_shown_and_nothing_is_changed(cli, stands, law):
    wrong = [{"name": "a", "residency": {"processing": {"allow": ["atlantis"]}}}, {"name": "a"}]
    result = cli.run("law", "set", law(tenants=wrong, extra=1), "--why", "x")
    output = cli.failed(result, 1)
    for one in ('unknown place "atlantis"', "tenants[1].residency: missing", 'unknown field "extra"', "already"):
        assert one in output
    assert "4 problems; nothing was changed" in output
    assert law_of(stands) is None


def test_a_change_based_on_an_older_law_is_refused(cli, stands, law):
    cli.run("law", "set", law(), "--why", "one")
    assert "has epoch 2, not 1" in cli.failed(cli.run("law", "set", law(), "--why", "x", "--after", "1"), 1)
    assert cli.run("law", "set", law(), "--why", "x", "--after", "2").exit_code == 0


def test_concurrent_change_of_the_law_is_refused(cli, stands, law, monkeypatch):
    cli.run("law", "set", law(), "--why", "one")
    document = law_document.encode(law_document.document_of(WORLD), 9, "bob", "meanwhile", AT)
    trim = room.newest_law

    async def meanwhile(store, *given):
        await store.put(LAW_KEY, document)
        return await trim(store, *given)

    monkeypatch.setattr(room, "newest_law", meanwhile)
    assert "another writer changed it" in cli.failed(cli.run("law", "set", law(), "--why", "x"), 1)
    assert law_of(stands).author == "bob"


def test_an_etcd_that_was_wiped_does_not_lead_back(cli, stands, law):
    stands.epoch = 40  # the law that balancers still use
    stands.knowing = 0
    result = cli.run("law", "set", law(), "--why", "after the wipe")
    assert "law of epoch 41 is set" in result.stdout
    assert "0 of 6 balancers follow it by now" in result.stderr


def test_an_impossible_epoch_does_not_prevent_setting_a_law(cli, stands, law):
    cli.run("law", "set", law(), "--why", "first", "--by", "ann")
    document = json.loads(bare(stands.get(LAW_KEY)))
    stands.put(LAW_KEY, json.dumps(document | {"epoch": 2**63 - 1}).encode())
    stands.put(f"{LAW_HISTORY_PREFIX}{2**60}", b"{}")
    stands.put(f"{LAW_HISTORY_PREFIX}{'9' * 5000}", b"{}")
    result = cli.run("law", "set", law(), "--why", "second", "--by", "ann")
    assert (result.exit_code, law_of(stands).why) == (0, "second"), result.output
    assert law_of(stands).epoch < 10
    stands.put(LAW_KEY, json.dumps(document | {"epoch": 2**53}).encode())
    assert "no other can follow it" in cli.failed(cli.run("law", "set", law(), "--why", "third"), 1)


def test_unreadable_law_is_reported_and_replaced(cli, stands, law):
    stands.put(LAW_KEY, b"nonsense")
    assert "cannot be read" in cli.failed(cli.run("law", "get"), 1)
    result = cli.run("law", "set", law(), "--why", "x")
    assert result.exit_code == 0
    assert "could not be read and is not kept" in result.stderr
    assert law_of(stands).epoch == 2
    stands.do(lambda store: store.put(law_history_key(1), b"{"))
    assert "1 entries there cannot be read" in cli.run("law", "history").stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch: 4\ntenants: []", "epoch: this command sets it"),
        ("tenants: []\ntenants: []", "given twice"),
        ("- a", "a mapping"),
        ("a: [", "not YAML"),
        (None, "no such file"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_bad_files_are_shown_in_lines(cli, stands, tmp_path, text, says):
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = cli.run("law", "set", str(path), "--why", "x")
    assert says in cli.failed(result, result.exit_code or 1)
    assert result.exit_code in (1, 2)
    assert law_of(stands) is None


def test_a_law_cannot_be_set_without_a_topology(cli, stands, law):
    output = cli.failed(cli.run("law", "set", law(), "--why", "x", "--etcd", stands.endpoint), 2)
    assert "give --config" in output
    assert "etcd holds no law" in cli.failed(cli.run("law", "get", "--etcd", stands.endpoint), 1)
    assert "no law was ever set" in cli.run("law", "history", "--etcd", stands.endpoint).stdout
    assert "--why" in cli.run("law", "set", law()).stderr


def test_blank_reason_is_refused(cli, stands, law):
    assert "why: is blank" in cli.failed(cli.run("law", "set", law(), "--why", " "), 1)


def test_other_commands_use_the_law_in_etcd(capsys):
    newer = law_document.encode({"tenants": [law_document.document_of(WORLD)["tenants"][1]]}, 5, "ann", "x", AT)
    assert set(room.under(WORLD, newer).tenants) == {"eu-only"}
    assert room.under(WORLD, None) is WORLD
    assert room.under(WORLD, law_document.encode(law_document.document_of(WORLD), 1, "ann", "x", AT)) is WORLD
    assert capsys.readouterr().err == ""
    assert room.under(WORLD, b"{") is WORLD
    assert "cannot be read" in capsys.readouterr().err


# -- unset, diff, sign, verify


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """The operator's key, in files; the environment names the private one."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(32))
    (tmp_path / "ops.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "ops.pub").write_bytes(public)
    monkeypatch.setenv("FARHOP_SIGNING_KEY", str(tmp_path / "ops.pem"))
    return tmp_path


def test_unset_sets_the_topologys_law_under_a_new_epoch(cli, stands, law):
    assert cli.run("law", "set", law("anywhere"), "--why", "one").exit_code == 0
    assert cli.run("law", "diff", law("anywhere")).exit_code == 0
    result = cli.run("law", "unset", "--why", "back")
    assert (result.exit_code, law_of(stands).epoch) == (0, 3)
    assert law_of(stands).tenants == WORLD.tenants
    changed = cli.run("law", "diff", law("anywhere"), "--json")
    assert (changed.exit_code, json.loads(changed.stdout)["removed"]) == (1, ["anywhere"])
    assert cli.run("law", "diff", law("anywhere"), "--epoch", "2").exit_code == 0
    assert "no law of epoch 9 is kept" in cli.failed(cli.run("law", "diff", law(), "--epoch", "9"), 1)


def test_with_a_key_what_is_set_is_signed_and_shown_to_be(cli, stands, law, keys):
    ours = Keys({"ops": (public_key((keys / "ops.pub").read_text()), ["law"])})
    assert cli.run("law", "set", law(), "--why", "one").exit_code == 0
    assert ours.open(LAW_KEY, stands.do(lambda store: store.get(LAW_KEY)).value).key == "ops"
    assert cli.run("law", "set", law("anywhere"), "--why", "two").exit_code == 0
    assert [one["epoch"] for one in json.loads(cli.run("law", "history", "--json").stdout)["law"]] == [3, 2]
    good = cli.run("law", "verify", "--public", str(keys / "ops.pub"))
    assert (good.exit_code, "epoch 3, signed by ops: the signature is good" in good.stdout) == (0, True)
    stands.put(LAW_KEY, law_document.encode(law_document.document_of(WORLD), 9, "eve", "mine", AT))
    bad = cli.run("law", "verify", "--public", str(keys / "ops.pub"), "--json")
    [output] = json.loads(bad.stdout)["law"]
    assert (bad.exit_code, output["good"], output["why"]) == (1, False, "it is not signed, and a law must be")
    assert output["source"]


def test_a_law_signed_with_the_key_can_be_set_without_it(cli, stands, law, keys, monkeypatch):
    result = cli.run("law", "sign", law("anywhere"), "--epoch", "6", "--why", "by hand", "--by", "ann")
    (keys / "signed").write_text(result.stdout)
    monkeypatch.delenv("FARHOP_SIGNING_KEY")
    assert cli.run("law", "verify", str(keys / "signed"), "--public", f"ops={keys / 'ops.pub'}").exit_code == 0
    assert cli.run("law", "verify", str(keys / "signed"), "--public", f"boss={keys / 'ops.pub'}").exit_code == 1
    assert cli.run("law", "diff", str(keys / "signed")).exit_code == 1
    assert "law of epoch 6 is set, by ann: by hand" in cli.run("law", "set", str(keys / "signed")).stdout
    assert stands.do(lambda store: store.get(LAW_KEY)).value == result.stdout.strip().encode()
    assert "sign it again" in cli.failed(cli.run("law", "set", str(keys / "signed")), 1)
    assert "--why: give the reason" in cli.failed(cli.run("law", "set", law()), 2)


def test_law_that_balancers_would_ignore_is_not_written(cli, stands, law, keys, tmp_path, monkeypatch):
    monkeypatch.setenv("FARHOP_TEST_HOP", "x" * 32)
    config = {
        "region": "tokyo", "instance": "g1", "listen": {"port": 0}, "admin": {"port": 1},
        "etcd": {"endpoints": [stands.endpoint]}, "hop": {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"},
        "signing": {"keys": {"ops": {"public": f"file:{tmp_path / 'ops.pub'}"}}},
    }  # fmt: skip
    (tmp_path / "global.yaml").write_text(yaml.safe_dump(config))
    put = ("law", "set", law("anywhere"), "--why", "x", "--config", str(tmp_path / "global.yaml"))
    monkeypatch.setenv("FARHOP_SIGNING_KEY", f"boss={tmp_path / 'ops.pem'}")
    assert "key 'boss', which is not configured" in cli.failed(cli.run(*put), 2)
    monkeypatch.delenv("FARHOP_SIGNING_KEY")
    output = cli.failed(cli.run(*put), 2)
    assert output.startswith("farhop: FARHOP_SIGNING_KEY: ")
    assert "it is not signed, and a law must be" in output
    assert law_of(stands) is None
    monkeypatch.setenv("FARHOP_SIGNING_KEY", str(tmp_path / "ops.pem"))
    assert (cli.run(*put).exit_code, law_of(stands).epoch) == (0, 2)


def test_missing_signed_law_is_not_reported_as_a_bad_signature(cli, keys):
    assert "no such file" in cli.failed(cli.run("law", "verify", "absent", "--public", str(keys / "ops.pub")), 2)
    assert "absent.pub: no such file" in cli.failed(cli.run("law", "verify", "--public", "absent.pub"), 2).lower()


@pytest.mark.parametrize(("key", "says"), [("absent.pem", "no such file"), ("law.yaml", "openssl genpkey")])
def test_a_key_that_is_none_is_named_with_the_remedy(cli, stands, law, tmp_path, monkeypatch, key, says):
    monkeypatch.setenv("FARHOP_SIGNING_KEY", str(tmp_path / key))
    assert says in cli.failed(cli.run("law", "set", law(), "--why", "x"), 2)
    assert law_of(stands) is None
