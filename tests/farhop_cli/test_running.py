"""The running world as commands see it: who is nearest, who asks, what their law lets be recorded."""

import msgspec
import pytest
import typer

from farhop_cli import running
from farhop_lab.world import world_file


@pytest.fixture
def here(world):
    return running.open_world(world.path)


def refused(capsys, work, *arguments) -> str:
    with pytest.raises(typer.Exit) as ended:
        work(*arguments)
    assert ended.value.exit_code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("place", "order"), [
    (None, ["virginia", "frankfurt", "tokyo"]),
    ("tokyo", ["tokyo", "virginia", "frankfurt"]),
    ("LONDON", ["frankfurt", "virginia", "tokyo"]),
    ("35.7,139.7", ["tokyo", "frankfurt", "virginia"]),
])  # fmt: skip
async def test_entries_are_ordered_by_distance_from_a_place(here, place, order):
    nearest = here.nearest(place)
    assert nearest[0] == order[0]
    assert sorted(nearest) == sorted(order)


@pytest.mark.parametrize(
    ("place", "says"), [("Parys", "Paris"), ("tokio", "tokyo"), ("99,999", "LAT,LON"), ("", "LAT,LON")]
)
async def test_an_unknown_place(here, capsys, place, says):
    assert says.lower() in refused(capsys, here.nearest, place).lower()


async def test_an_entry_is_known_by_its_origin(here, world):
    assert here.region_of(world.file.regions["tokyo"].entry) == "tokyo"
    assert here.region_of("http://elsewhere") is None


async def test_a_caller_is_given_by_tenant_or_by_key_and_not_both(here, capsys):
    assert running.caller(here, None, None, ()).tenant == "anywhere"
    assert running.caller(here, "eu-only", None, ()).key == "sk-farhop-eu-only"
    assert running.caller(here, None, "sk-farhop-not-us", ("jp",)).tenant == "not-us"
    assert running.caller(here, None, "sk-stranger", ()).tenant is None
    assert "leave one" in refused(capsys, running.caller, here, "eu-only", "sk-farhop-not-us", ())
    assert "no key" in refused(capsys, running.caller, here, "bob", None, ())


async def test_forbidden_record_is_reported(here):
    def barred(tenant: str, region: str, *allow: str) -> str | None:
        return here.record_barred(running.caller(here, tenant, None, allow), region)

    assert barred("anywhere", "tokyo") is None
    assert "logging allows only eu" in barred("eu-only", "tokyo")
    assert "stay within cn" in barred("anywhere", "tokyo", "cn")
    assert here.record_barred(running.Caller(None, "sk-stranger"), "tokyo") is None


async def test_places_are_checked_against_the_topology(here, capsys):
    assert running.places(here.topology, None) == ()
    assert running.places(here.topology, "eu, jp") == ("eu", "jp")
    assert running.places(None, "mars") == ("mars",)
    assert "mars" in refused(capsys, running.places, here.topology, "eu,mars")
    assert "separated by commas" in refused(capsys, running.places, here.topology, "eu,,jp")


async def test_a_world_without_keys_has_no_default(world, capsys):
    world_file.write(world.path, msgspec.structs.replace(world.file, keys={}))
    assert "--tenant or --key" in refused(capsys, running.default_tenant, running.open_world(world.path))


@pytest.mark.parametrize(("change", "says"), [
    ({"topology": "/nowhere.yaml"}, "topology cannot be read"),
    ({"pid": 2**22 + 1}, "farhop up"),
    ({"regions": {"osaka": None}}, "osaka"),
])  # fmt: skip
async def test_worlds_that_do_not_run(world, capsys, change, says):
    if "regions" in change:
        change = {"regions": {"osaka": world.file.regions["tokyo"]}}
    world_file.write(world.path, msgspec.structs.replace(world.file, **change))
    assert says in refused(capsys, running.open_world, world.path)
