from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import typer
import yaml

from farhop_cli import where
from farhop_cli.where import latencies, run, without_subnet
from topology.load import document, shipped


@pytest.fixture
def config(tmp_path):
    world = document(shipped("three-regions").read_text())
    world["entries"] = [
        {"name": name, "region": name, "ipv4": [f"192.0.2.{n}"], "ipv6": [f"2001:db8::{n}"]}
        for n, name in enumerate(("virginia", "frankfurt", "tokyo"), 1)
    ]
    (tmp_path / "world.yaml").write_text(yaml.safe_dump(world))
    zone = {"zone": "entry.example", "servers": ["ns1.entry.example"], "names": [{"name": "api.entry.example"}]}
    path = tmp_path / "dns.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "region": "tokyo",
                "instance": "dns-1",
                "admin": {"port": 1},
                "topology": str(tmp_path / "world.yaml"),
                "zones": [zone],
                "networks": {"lists": [{"cidrs": ["203.0.113.0/24"], "near": "tokyo", "within": ["jp"]}]},
            }
        )
    )
    return path


def test_where_answers_from_the_file_alone(config, capsys) -> None:
    assert run("203.0.113.7", "", config, "", "", True, True) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["network"] == "203.0.113.0/24"
    assert [one["entry"] for one in body["entries"] if one["place"]] == ["tokyo"]
    assert run("203.0.113.7", "", config, "", "", True, False) == 0
    content = capsys.readouterr().out
    assert "the answer holds for 203.0.113.0/24" in content
    assert content.splitlines()[-3:] == [
        "without a client subnet: tokyo; what is lawful for every network, as a resolver gives it to all of its clients"
        " (networks.without_subnet: shared)",
        "  not frankfurt: 203.0.113.0/24 is confined to other places",
        "  not virginia: 203.0.113.0/24 is confined to other places",
    ]
    config.write_text(config.read_text().replace("networks:", "networks:\n  without_subnet: resolver"))
    assert run("203.0.113.7", "", config, "", "", True, False) == 0
    assert "as for the resolver's own address, whatever its clients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"by": "all", "entries": ["a", "b"], "kept_back": {}}, ["without a client subnet: a, b, as for all clients"]),
        (
            {"by": "resolver", "entries": None, "kept_back": {}},
            ["without a client subnet: as for the resolver's own address; no network is confined"],
        ),
        (
            {"by": "shared", "entries": [], "kept_back": {"a": "192.0.2.0/24"}},
            [
                "without a client subnet: SERVFAIL, as there is none; what is lawful for every network, as a resolver"
                " gives it to all of its clients (networks.without_subnet: shared)",
                "  not a: 192.0.2.0/24 is confined to other places",
            ],
        ),
    ],
)
def test_answer_without_a_client_subnet(found, message) -> None:
    assert without_subnet(found) == message


@pytest.mark.parametrize(
    ("client", "tenant", "admin", "offline", "message"),
    [
        ("nonsense", "", "", True, "is no address"),
        ("1.2.3.4", "nobody", "", True, "is not in the law"),
        ("1.2.3.4", "", "", False, "http://127.0.0.1:1 cannot be asked"),
        ("1.2.3.4", "", "localhost", False, "is no URL"),
    ],
)
def test_unanswerable_question_is_reported_in_one_line(config, capsys, client, tenant, admin, offline, message) -> None:
    with pytest.raises(typer.Exit) as ended:
        run(client, tenant, config, admin, "", offline, False)
    assert ended.value.exit_code == 2
    content = capsys.readouterr().err
    assert message in content
    assert content.count("\n") == 1


FOUND = [
    {"network": "8.8.8.0/24", "predicted": {"virginia": 164.0, "tokyo": 1.0}, "measured": {"virginia": 8.0},
     "costs": {"virginia": 8.0, "tokyo": 158.0}, "before": "tokyo", "now": "virginia", "why": ""},
    {"network": "9.9.9.0/24", "predicted": {"virginia": 164.0, "tokyo": 1.0}, "measured": {"tokyo": 230.0},
     "costs": {"virginia": 164.0, "tokyo": 1.0}, "before": "tokyo", "now": "tokyo", "why": "one region alone"},
    {"network": "2600::/48", "predicted": {"virginia": 5.0, "tokyo": 160.0}, "measured": {"virginia": 9.0},
     "costs": {"virginia": 5.0, "tokyo": 160.0}, "before": "virginia", "now": "virginia", "why": "one region alone"},
    {"network": "1.1.1.0/24", "predicted": {}, "measured": {"tokyo": 4.0}, "costs": {"virginia": 170.0, "tokyo": 4.0},
     "before": "", "now": "tokyo", "why": ""},
]  # fmt: skip


@pytest.fixture
def asked() -> list[str | None]:
    """What came as `Authorization`."""
    return []


@pytest.fixture
def admin(asked: list[str | None]) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("authorization"))
            body = json.dumps({"networks": FOUND}).encode()
            self.send_response(200 if self.path == "/latencies" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_difference_between_geography_and_measurement_is_shown(config, admin, capsys) -> None:
    assert latencies(config, admin, "", 20.0, as_json=False) == 0
    content = capsys.readouterr().out
    assert "4 networks measured, 3 not as geography says (by 20 ms), 2 led elsewhere" in content
    assert "tokyo -> virginia" in content
    assert "? -> tokyo" in content
    assert "one region alone" in content
    assert "2600::" not in content
    assert latencies(config, admin, "", 300.0, as_json=True) == 0
    assert [one["network"] for one in json.loads(capsys.readouterr().out)] == ["8.8.8.0/24", "1.1.1.0/24"]


def test_a_token_does_not_travel_in_plaintext(config, capsys) -> None:
    with pytest.raises(typer.Exit):
        run("192.0.2.1", "", config, "http://192.0.2.53:9053", "secret", False, False)
    assert "the token does not travel in plaintext" in capsys.readouterr().err


def test_the_admin_port_gets_the_context_s_token(cli, monkeypatch, tmp_path, admin, asked) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DNS_TOKEN", "0123456789abcdef")
    assert cli.run("context", "set", "dns", "--admin", admin, "--token", "env:DNS_TOKEN").exit_code == 0
    for words in (("dns", "latencies", "--admin", admin), ("where", "192.0.2.1", "--admin", admin)):
        cli.run(*words, "--context", "dns")
        assert asked.pop() == "Bearer 0123456789abcdef"
    cli.run("dns", "latencies", "--admin", admin, "--context", "dns", "--token", "another")
    assert asked.pop() == "Bearer another"


def test_error_without_a_configuration_names_the_process(cli, tmp_path):
    for words in (("where", "192.0.2.1"), ("dns", "--config", str(tmp_path / "nowhere.yaml"), "latencies")):
        text = cli.failed(cli.run(*words), 2)
        assert text.endswith("cannot be read: No such file or directory; --config is the DNS server's configuration\n")


def test_control_characters_from_the_server_are_not_printed(capsys) -> None:
    evil = "\x1b]0;owned\x07[link=http://evil]x[/link]\u202e"
    entry = {"place": evil, "entry": evil, "region": evil, "ms": 1.0, "bias_ms": 0.0, "geography_ms": 1.0,
             "state": evil, "share": 1.0, "why": evil}  # fmt: skip
    without = {"entries": [evil], "by": "all", "kept_back": {evil: evil}}
    where._print({
        "client": evil, "tenant": evil, "known": evil, "law_epoch": 1, "network": evil, "entries": [entry],
        "without_subnet": without,
    })  # fmt: skip
    told = capsys.readouterr().out
    assert told.replace("\n", "").isprintable()
    assert told.count("[link=http://evil") == told.count("owned")
