"""Which fleet a command is for: a world, a configuration, an etcd alone."""

import ssl

import pytest
import typer
import yaml
from aiohttp import web

from farhop_cli import fleet
from farhop_cli.fleet import Fleet
from farhop_lab.world.certs import Authority

CONFIG = {
    "region": "tokyo", "instance": "g1", "topology": "three-regions", "listen": {"port": 0},
    "admin": {"host": "0.0.0.0", "port": 9100, "insecure": True},
    "etcd": {"endpoints": ["10.0.0.1:2379", "10.0.0.2:2379"], "insecure": True},
    "hop": {"keys": {"k1": "env:FARHOP_TEST_HOP"}, "active": "k1"},
}  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("FARHOP_TEST_HOP", "x" * 32)

    def write(**fields):
        path = tmp_path / "global.yaml"
        path.write_text(yaml.safe_dump({**CONFIG, **fields}))
        return path

    return write


def ended(capsys, *arguments) -> str:
    with pytest.raises(typer.Exit) as exit_:
        fleet.find(*arguments)
    assert exit_.value.exit_code == 2
    content = capsys.readouterr().err
    assert content.count("\n") == 1
    return content


async def test_a_fleet_given_by_a_running_world_has_its_hubs_topology_and_admin_ports(world):
    found = fleet.find(world.path, None, None)
    assert next(iter(found.hubs.values())).endpoints == ("127.0.0.1:2379",)
    assert found.topology.name == "three-regions"
    assert list(found.admins) == [one.global_admin for one in world.file.regions.values()]


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.1.1.1", "10.1.1.1")])
def test_a_fleet_given_by_a_configuration_has_its_hubs_topology_and_admin_port(config, tmp_path, host, asked):
    found = fleet.find(tmp_path / "none.json", config(admin={"host": host, "port": 9100, "insecure": True}), None)
    assert next(iter(found.hubs.values())).endpoints == ("10.0.0.1:2379", "10.0.0.2:2379")
    assert "tokyo" in found.topology.regions
    assert found.admins == (f"http://{asked}:9100",)


def test_an_operator_needs_no_secret_of_a_balancers(config, tmp_path, monkeypatch, capsys):
    path = config()
    monkeypatch.delenv("FARHOP_TEST_HOP", raising=False)
    monkeypatch.delenv("HOP", raising=False)
    assert fleet.find(tmp_path / "none.json", path, None).topology is not None
    secret = config(
        etcd={"endpoints": ["127.0.0.1:1"], "ca_file": "ca.pem", "username": "u", "password": "env:NOT_SET"}
    )
    assert "etcd.password: the variable or file that it names is missing" in ended(
        capsys, tmp_path / "none.json", secret, None
    )


def test_an_admin_port_with_tls(config, tmp_path):
    pair = Authority(tmp_path).issue("server")
    tls = {"cert_file": pair.cert_file, "key_file": pair.key_file}
    found = fleet.find(tmp_path / "none.json", config(admin={"port": 9100, "tls": tls}), None)
    assert found.admins == ("https://127.0.0.1:9100",)


async def test_with_a_configuration_only_its_own_certificate_is_trusted(config, tmp_path):
    authority = Authority(tmp_path)
    own, other = authority.issue("server"), authority.issue("stranger")

    async def status(_request):
        return web.json_response({"tier": "global", "region": "virginia", "instance": "g1"})

    for shown in (own, other):
        app = web.Application()
        app.router.add_get("/status", status)
        runner = web.AppRunner(app)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(shown.cert_file, shown.key_file)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        tls = {"cert_file": own.cert_file, "key_file": own.key_file}
        found = fleet.find(tmp_path / "none.json", config(admin={"port": runner.addresses[0][1], "tls": tls}), None)
        (seen,) = await found.seen("global")
        assert (seen.status is not None) == (shown is own), seen.error
        await runner.cleanup()


async def test_error_for_an_unreachable_admin_port_names_the_option_to_give(config, tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = {"cert_file": pair.cert_file, "key_file": pair.key_file, "client_ca_file": authority.ca_file}
    (seen,) = await fleet.find(tmp_path / "none.json", config(admin={"port": 9100, "tls": tls}), None).seen()
    assert "only operators with a certificate; give a context instead, with `admin.ca_file`" in seen.error
    gone = {"cert_file": str(tmp_path / "gone.crt"), "key_file": str(tmp_path / "gone.key")}
    (seen,) = await fleet.find(tmp_path / "none.json", config(admin={"port": 9100, "tls": gone}), None).seen()
    assert "gone.crt, cannot be read" in seen.error


def test_a_fleet_given_by_etcd_alone_has_no_topology_and_no_admin_ports(tmp_path):
    found = fleet.find(tmp_path / "none.json", None, "127.0.0.1:1")
    assert (next(iter(found.hubs.values())).endpoints, found.topology, found.admins) == (("127.0.0.1:1",), None, ())
    assert "127.0.0.1:1" in found.trouble[0]


def test_error_is_reported_in_one_line(config, tmp_path, capsys):
    none = tmp_path / "none.json"
    assert "farhop up" in ended(capsys, none, None, None)
    assert "not both" in ended(capsys, none, config(), "h:1")
    assert "is not HOST:PORT" in ended(capsys, none, None, "nonsense")
    assert "--config" in ended(capsys, none, config(region="atlantis"), None)
    assert "--config" in ended(capsys, none, config(listen=5, admin=7), None)
    assert "--config" in ended(capsys, none, tmp_path / "no.yaml", None)


async def test_balancer_of_the_region_is_asked_if_known(world, made):
    world.status["tokyo", "regional_admin"] = made.regional_status("r1")
    world.silent.add(("virginia", "regional_admin"))
    found = fleet.find(world.path, None, None)
    assert (await found.status_of("tokyo"))["tier"] == "regional"
    assert await found.status_of("virginia") is None
    assert await Fleet({}, None).status_of("tokyo") is None


async def test_a_balancer_that_does_not_answer_is_left_out(world, made):
    for name in world.file.regions:
        world.status[name, "global_admin"] = made.global_status(virginia="up")
    world.silent.add(("tokyo", "global_admin"))
    assert len(await fleet.find(world.path, None, None).statuses()) == 2


def test_for_an_unknown_region_the_nearest_name_is_offered(capsys):
    fleet.known("tokyo", ["tokyo"], "here")
    for region, remedy in (("Tokio", 'did you mean "tokyo"?'), ("zzz", "there is frankfurt, tokyo")):
        with pytest.raises(typer.Exit):
            fleet.known(region, ["tokyo", "frankfurt"], "here")
        assert remedy in capsys.readouterr().err
