"""`farhop hash-key`: the hash of a key given, read or made; what cannot be a key is refused."""

import json
import re

import pytest
from typer.testing import CliRunner

from farhop.identity.api_keys import bearer, digest
from farhop_cli.main import app

KEY = "sk-farhop-anywhere"
HASH = "335078c42e6b78425b5e14fdbeba75fcf73be243ae4d866d7e08e87fce0969f5"


def test_a_key_given_as_argument(cli):
    result = cli.run("hash-key", KEY)
    assert (result.exit_code, result.stdout) == (0, f"{HASH}\n")


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f"{KEY}\r\n"])
def test_a_key_from_standard_input(cli, text):
    assert cli.run("hash-key", stdin=text).stdout == f"{HASH}\n"


def test_a_generated_key_is_strong_new_and_usable(cli):
    shown = [cli.run("hash-key", "--generate").stdout for _ in range(2)]
    key, sha256 = re.fullmatch(r"key     (\S+)\nsha256  (\S+)\n", shown[0]).groups()
    assert shown[0] != shown[1]
    assert len(key.removeprefix("sk-")) >= 43
    assert bearer(f"Bearer {key}".encode()) == key
    assert digest(key) == sha256


def test_hash_key_prints_json(cli):
    output = json.loads(cli.run("hash-key", "--generate", "--json").stdout)
    assert digest(output["key"]) == output["sha256"]
    assert json.loads(cli.run("hash-key", KEY, "--json").stdout) == {"sha256": HASH}


@pytest.mark.parametrize("key", ["two words", "schlüssel", "x" * 513, ""])
def test_key_that_no_header_can_carry_is_refused_without_showing_it(cli, key):
    output = cli.failed(cli.run("hash-key", stdin=key), 2)
    assert not key or key not in output


def test_undecodable_argument_is_refused(cli):
    assert "cannot be an API key" in cli.failed(cli.run("hash-key", "sk-\udcff"), 2)


def test_undecodable_standard_input_is_refused(cli):
    result = CliRunner().invoke(app(), ["hash-key"], input=b"\xff\xfe")
    assert "not text" in cli.failed(result, 2)


def test_a_key_and_generate_exclude_one_another(cli):
    assert "not both" in cli.failed(cli.run("hash-key", KEY, "--generate"), 2)
