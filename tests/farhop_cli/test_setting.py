"""Every verb of every noun against a real etcd: who, why, until when, in words, as JSON, and as a dry run."""

import json
from datetime import UTC, datetime

import pytest
import yaml
from msgspec.structs import replace

from farhop.store.contract import ROOT
from farhop.store.etcd import EtcdStore
from farhop_cli import setting
from farhop_cli.setting import Item, Setting
from farhop_lab.world import world_file

# By noun: the arguments, the key, the text that is shown, another setting's arguments, and those of unset.
NOUNS = {
    "drain": (
        ("virginia", "--over", "0s"), "override/virginia", "virginia: drained, at once", ("virginia",), ("virginia",),
    ),
    "bias": (
        ("virginia", "--ms", "50"), "steer/bias/virginia", "virginia: counts as 50 ms worse than it is",
        ("virginia", "--ms", "-5"), ("virginia",),
    ),
    "pin": (
        ("virginia", "--tenant", "anywhere"), "steer/pin/tenant/anywhere",
        "tenant anywhere: to virginia, while it serves", ("virginia", "--tenant", "anywhere", "--strict"),
        ("--tenant", "anywhere"),
    ),
    "route": (
        ("virginia", "{answer: redirect}", "--tenant", "anywhere"), "route/virginia",
        'virginia, tenant anywhere: {"answer":"redirect"}', ("virginia", "{policy: nearest}", "--tenant", "anywhere"),
        ("virginia",),
    ),
    "policy": (
        ("virginia", "p2c"), "pick/virginia", "virginia, all other models: p2c", ("virginia", "random"), ("virginia",),
    ),
    "split": (
        ("virginia", "--model", "llama", "--weights", "v1=95,v2=5"), "split/virginia",
        "virginia, model llama: v1=95,v2=5", ("virginia", "--model", "llama", "--weights", "v2=1"), ("virginia",),
    ),
}  # fmt: skip
REGIONS = ("virginia", "frankfurt", "tokyo")
SIGNED = ("--why", "kernel update", "--by", "ann@ops")


@pytest.fixture(params=NOUNS)
def noun(request):
    return request.param


@pytest.fixture(params=["drain", "split"])
def either(request):
    """Of each kind one: what ends by its lease and all entries follow, and what stands and its region follows."""
    return request.param


def test_an_override_is_shown_with_author_and_reason_until_it_is_unset(cli, stands, noun):
    arguments, key, shown, _, undo = NOUNS[noun]
    before = datetime.now(UTC).replace(microsecond=0)
    assert cli.run(noun, "get").stdout.startswith(("no", "nothing"))
    result = cli.run(noun, "set", *arguments, *SIGNED)
    assert (result.exit_code, result.stderr) == (0, "")
    assert shown in result.stdout
    assert "by ann@ops at " in result.stdout
    assert "balancers follow it" in result.stdout
    got = cli.run(noun, "get", "virginia").stdout
    assert got.startswith(f"{shown}\n  by ann@ops at ")
    assert got.rstrip().endswith(": kernel update")
    assert cli.run(noun, "get", "tokyo").stdout.startswith(("no", "nothing"))
    [row] = json.loads(cli.run(noun, "get", "--json").stdout)[noun]
    assert (row["author"], row["why"]) == ("ann@ops", "kernel update")
    assert before <= datetime.fromisoformat(row["at"]) <= datetime.now(UTC)
    assert (row["until"] is not None) is (noun in ("drain", "bias", "pin"))
    result = cli.run(noun, "unset", *undo)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"unset: {shown}, by ann@ops at " in result.stdout
    assert cli.run(noun, "get").stdout.startswith(("no", "nothing"))
    assert "nothing was changed" in cli.failed(cli.run(noun, "unset", *undo), 1)
    assert key in {name.removeprefix(ROOT) for name in stands.all(ROOT)} or noun in ("drain", "bias", "pin")


def test_json_is_all_there_is_and_a_dry_run_writes_nothing(cli, stands, noun):
    arguments, key, _, other, undo = NOUNS[noun]
    printed = json.loads(cli.run(noun, "set", *arguments, *SIGNED, "--dry-run", "--json").stdout)
    assert (printed["noun"], printed["dry_run"], printed["was"], printed["balancers"]) == (noun, True, [], 0)
    assert stands.get(ROOT + key) is None
    output = cli.run(noun, "set", *arguments, *SIGNED, "--dry-run").stdout
    assert output.startswith("dry run, nothing is written: ")
    first = json.loads(cli.run(noun, "set", *arguments, *SIGNED, "--json").stdout)
    assert first["set"][0]["value"] == printed["set"][0]["value"]
    assert first["aware"] == first["balancers"] == (3 if noun in ("drain", "bias", "pin") else 1)
    second = json.loads(cli.run(noun, "set", *other, "--why", "more", "--by", "bob", "--json").stdout)
    assert (second["set"][0]["author"], second["was"][0]["author"]) == ("bob", "ann@ops")
    assert second["was"][0]["value"] == first["set"][0]["value"]
    document = stands.get(ROOT + key)
    assert cli.run(noun, "unset", *undo, "--dry-run").stdout.startswith("dry run, nothing is written: unset: ")
    assert stands.get(ROOT + key) == document
    gone = json.loads(cli.run(noun, "unset", *undo, "--json").stdout)
    assert (gone["set"], gone["was"][0]["author"]) == ([], "bob")
    assert gone["aware"] == gone["balancers"] > 0


# How many balancers a dry run of each asks: the global ones, or the one of the region.
ASKED = {"drain": 3, "bias": 3, "pin": 3, "route": 3, "policy": 1, "split": 1}


@pytest.fixture
async def seen(world, made, embedded_etcd):
    """A world over a real etcd whose admin ports answer."""
    world_file.write(world.path, replace(world.file, etcd=embedded_etcd.endpoint))
    for region in REGIONS:
        world.status[region, "global_admin"] = made.global_status(**dict.fromkeys(REGIONS, "up"))
        world.status[region, "regional_admin"] = made.regional_status("one")
    return world


async def test_dry_run_without_all_answers_is_reported_as_partial(cli, seen, noun):
    words = (noun, "set", *NOUNS[noun][0], *SIGNED, "--dry-run")
    whole = await cli.in_thread(*words)
    assert (whole.exit_code, whole.stderr) == (0, "")
    assert json.loads((await cli.in_thread(*words, "--json")).stdout)["unreachable"] == []
    who = ("virginia", "global_admin" if ASKED[noun] == 3 else "regional_admin")
    seen.silent.add(who)
    told = await cli.in_thread(*words)
    assert told.exit_code == 3
    assert f"{ASKED[noun] - 1} of {ASKED[noun]} balancers answered: http://127.0.0.1:" in told.stderr
    assert told.stdout.startswith("dry run, nothing is written: ")
    [why] = json.loads((await cli.in_thread(*words, "--json")).stdout)["unreachable"]
    assert "cannot be reached" in why


async def test_dry_run_reports_no_effects_if_no_balancer_answers(cli, seen, either):
    seen.silent |= {(name, role) for name in REGIONS for role in ("global_admin", "regional_admin")}
    force = ("--force",) if either == "drain" else ()
    told = await cli.in_thread(either, "set", *NOUNS[either][0], *SIGNED, *force, "--dry-run", "--json")
    assert told.exit_code == 3
    said = json.loads(told.stdout)
    assert (said["effects"], len(said["unreachable"])) == ([], ASKED[either])


async def test_dry_run_of_a_law_without_all_answers_is_reported_as_partial(cli, seen, tmp_path):
    (tmp_path / "law.yaml").write_text((await cli.in_thread("law", "get")).stdout)
    words = ("law", "set", str(tmp_path / "law.yaml"), "--why", "x", "--dry-run")
    assert (await cli.in_thread(*words)).exit_code == 0
    seen.silent.add(("tokyo", "regional_admin"))
    told = await cli.in_thread(*words)
    assert (told.exit_code, "5 of 6 balancers answered" in told.stderr) == (3, True)
    [_] = json.loads((await cli.in_thread(*words, "--json")).stdout)["unreachable"]
    assert (await cli.in_thread("law", "diff", str(tmp_path / "law.yaml"))).exit_code == 3


async def test_a_read_from_one_of_two_hubs_is_partial_and_a_write_there_is_not(cli, seen, either):
    hubs = {"here": json.loads(seen.path.read_text())["etcd"], "gone": "127.0.0.1:1"}
    world_file.write(seen.path, replace(world_file.read(seen.path), hubs=hubs))
    for words in ((either, "get"), (either, "set", *NOUNS[either][0], *SIGNED, "--dry-run")):
        told = await cli.in_thread(*words)
        assert (told.exit_code, "etcd: hub gone: " in told.stderr) == (3, True)
    told = await cli.in_thread(either, "set", *NOUNS[either][0], *SIGNED)
    assert told.exit_code == 0
    assert "hub gone was not reached, so what is set there stays, unless it expires" in told.stderr
    assert (await cli.in_thread(either, "unset", *NOUNS[either][4])).exit_code == 0


def test_replaced_override_is_shown(cli, stands, noun):
    arguments, _, shown, other, _ = NOUNS[noun]
    cli.run(noun, "set", *arguments, *SIGNED)
    assert f"this replaces: {shown}, by ann@ops" in cli.run(noun, "set", *other, "--why", "x", "--by", "bob").stdout


@pytest.mark.parametrize("either", ["drain", "split", "route"])  # in the last one, one word holds several values
def test_a_file_is_compared_with_what_is_set(cli, stands, either, tmp_path):
    arguments, _, shown, other, undo = NOUNS[either]
    assert cli.run(either, "diff").exit_code == 0
    cli.run(either, "set", *arguments, *SIGNED)
    (tmp_path / "was.json").write_text(cli.run(either, "get", "--json").stdout)
    file = str(tmp_path / "was.json")
    assert (cli.run(either, "diff", file).exit_code, cli.run(either, "diff", file).stdout) == (0, "no difference\n")
    plain = cli.run(either, "diff")
    assert (plain.exit_code, plain.stdout) == (1, f"- {shown}\n")
    cli.run(either, "set", *other, "--why", "x")
    changed = cli.run(either, "diff", file, "--region", "virginia")
    assert (changed.exit_code, changed.stdout[:2]) == (1, "~ ")
    assert changed.stdout.endswith(f"-> {shown.partition(': ')[2]}\n")
    assert cli.run(either, "diff", file, "--region", "tokyo").exit_code == 0
    cli.run(either, "unset", *undo)
    added = cli.run(either, "diff", file, "--json")
    assert (added.exit_code, len(json.loads(added.stdout)["added"])) == (1, 1)
    assert cli.run(either, "diff", "-", "--json").exit_code == 2  # standard input is empty


def test_former_overrides_are_shown(cli, stands, noun):
    arguments, _, _, _, undo = NOUNS[noun]
    cli.run(noun, "set", *arguments, *SIGNED)
    more = () if noun in ("drain", "bias", "pin") else ("--why", "done", "--by", "bob")
    cli.run(noun, "unset", *undo, *more)
    printed = json.loads(cli.run(noun, "history", "--json").stdout)
    assert printed["since_revision"] >= 1
    last, first = printed[noun][:2]
    assert (first["author"], first["why"], len(first["items"])) == ("ann@ops", "kernel update", 1)
    assert (last["author"], last["why"], last["items"]) == (("bob", "done", []) if more else (None, None, []))
    assert last["revision"] > first["revision"]
    output = " ".join(cli.run(noun, "history", "virginia").stdout.split())
    assert "kernel update" in output
    assert "etcd remembers what was written since its revision" in output
    assert "kernel update" not in cli.run(noun, "history", "tokyo").stdout


def test_the_author_is_the_user_at_the_keyboard(cli, stands, either, monkeypatch):
    monkeypatch.setattr(setting.getpass, "getuser", lambda: "bob")
    monkeypatch.setattr(setting.socket, "gethostname", lambda: "desk")
    output = json.loads(cli.run(either, "set", *NOUNS[either][0], "--why", "x", "--json").stdout)
    assert output["set"][0]["author"] == "bob@desk"


def test_concurrent_operators_do_not_overwrite_each_other(cli, stands, either, monkeypatch):
    arguments, key, _, other, undo = NOUNS[either]
    cli.run(either, "set", *arguments, *SIGNED)
    document = stands.get(ROOT + key)

    get = EtcdStore.get

    async def overtaken(self, read_key):
        """Whoever looks is followed by another, who writes the same once more."""
        found = await get(self, read_key)
        if read_key == ROOT + key:
            await self.put(read_key, document)
        return found

    for command in ((either, "set", *other, "--why", "y"), (either, "unset", *undo)):
        with monkeypatch.context() as patched:
            patched.setattr(EtcdStore, "get", overtaken)
            assert "another writer changed it" in cli.failed(cli.run(*command), 1)
        assert stands.get(ROOT + key) == document


def test_balancers_that_do_not_follow_yet_are_named(cli, stands, either, monkeypatch):
    monkeypatch.setattr(setting, "KNOWN_WITHIN_S", 0.2)
    stands.knowing = 0
    result = cli.run(either, "set", *NOUNS[either][0], "--why", "x")
    assert result.exit_code == 0
    assert "balancers follow it by now; the others follow when they can" in result.stderr


def test_unreadable_override_is_reported_and_can_be_unset(cli, stands, either):
    _, key, _, _, undo = NOUNS[either]
    stands.put(ROOT + key, b"nonsense")
    assert f"{ROOT}{key} cannot be read" in cli.run(either, "get").stderr
    assert "cannot be read" in cli.run(either, "history").stdout
    assert "the previous document could not be read" in cli.run(either, "unset", *undo).stdout
    assert cli.run(either, "get").stderr == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--why", " "), "--why"),
        (("--why", "x", "--by", "a\tb"), "--by: must be"),
        (("--why", "x", "--etcd", "nonsense"), "--etcd"),
        (("--why", "x", "--etcd", "127.0.0.1:1"), "etcd"),
        (("--why", "x", "--config", "absent.yaml"), "--config"),
    ],
)
def test_error_is_reported_in_one_line_with_exit_code_2(cli, stands, either, more, message):
    arguments, key, _, _, _ = NOUNS[either]
    output = cli.failed(cli.run(either, "set", *arguments, *more), 2)
    assert message in output
    assert output.count("\n") == 1
    assert stands.get(ROOT + key) is None


def test_an_unknown_region_is_reported_with_the_nearest_name(cli, stands, noun):
    for verb in ("get", "set", "unset", "history") if noun in ("drain", "split") else ("set",):
        arguments = (*NOUNS[noun][0][1:], "--why", "x") if verb == "set" else ()
        assert 'did you mean "virginia"?' in cli.failed(cli.run(noun, verb, "virginai", *arguments), 2)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not YAML or JSON"), ("a: 1", "get --json"), (None, "no such file"), (b"\xff", "not YAML")]
)
def test_diff_against_an_unreadable_file_is_reported(cli, stands, tmp_path, text, says):
    if text is not None:
        (tmp_path / "bad").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert says in cli.failed(cli.run("split", "diff", str(tmp_path / "bad")), 2)


def test_a_configuration_is_a_file_of_what_is_overridden(cli, stands, tmp_path):
    regional = {"region": "virginia", "policy": "p2c", "policies": {"llama": "prefix", "qwen": "random"}}
    entry = {"region": "virginia", "routes": [{"tenant": "anywhere", "policy": "nearest"}]}
    for name, document in (("regional", regional), ("global", entry)):
        (tmp_path / name).write_text(yaml.safe_dump(document))
    assert cli.run("policy", "diff", str(tmp_path / "regional")).exit_code == 0
    cli.run("policy", "set", "virginia", "least-load", "--model", "llama", "--why", "x")
    cli.run("route", "set", "virginia", "{policy: waterfall}", "--tenant", "anywhere", "--why", "x")
    text = cli.run("policy", "diff", str(tmp_path / "regional"))
    assert (text.exit_code, text.stdout) == (1, "~ virginia, model llama: least-load -> prefix\n")
    text = cli.run("route", "diff", str(tmp_path / "global"))
    assert text.stdout == '~ virginia, tenant anywhere: {"policy":"waterfall"} -> {"policy":"nearest"}\n'


def test_an_etcd_alone_is_enough_to_look_and_to_unset(cli, stands, either):
    arguments, _, shown, _, undo = NOUNS[either]
    cli.run(either, "set", *arguments, *SIGNED)
    alone = ("--etcd", stands.endpoint)
    assert shown in cli.run(either, "get", *alone).stdout
    assert cli.run(either, "history", *alone).exit_code == 0
    assert cli.run(either, "diff", *alone).exit_code == 1
    assert cli.run(either, "unset", *undo, *alone).exit_code == 0


def test_title_and_byline_name_the_subject_and_the_author():
    assert setting.title({"region": "tokyo", "model": ""}) == "tokyo, all other models"
    assert setting.title({"region": "tokyo", "tenant": "acme", "model": "m"}) == "tokyo, tenant acme, model m"
    assert setting.byline(Setting((Item({}, 1),))) == "written by hand; no author is named"
