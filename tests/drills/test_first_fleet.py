"""docs/start/first-fleet.md, word by word: its second part is pasted into a shell and says what it says it does.

Only the ports are others than in the text, each the same throughout: nothing else on this machine is in the way. And
the shell's `farhop` is a fork of one that has done its imports, which were three quarters of what the page costs.
The same runs with real engines where `make engines` installed them (`make test-engines`), as the text says.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import commands

from farhop_lab.world.etcd import find_binary
from farhop_lab.world.ports import free_ports

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "start" / "first-fleet.md"
PORT = re.compile(r"(?<=[:\s/])(?:80|90|91|23)\d\d(?=[\s/\"},]|$)", re.M)
SAYS = "# says: "
REAL = ROOT / ".engines"
ENGINES = {"emulated": "farhop", "vllm": "vllm/bin/vllm", "llama-server": "llama/build/bin/llama-server"}  # the program
MODELS = {
    "vllm": {"MODEL": str(REAL / "tiny/model"), "VLLM_CPU_KVCACHE_SPACE": "1"},
    "llama-server": {"MODEL": "tiny", "GGUF": str(REAL / "tiny/model.gguf")},
}
HANGS_S = 900.0  # a busy machine takes a while, and so does a real engine's start
SLOW_ETCD = 'etcd() { sleep 1; exec etcd "$@"; }\n'  # as on a busy machine: what follows must wait for it


def blocks(engine: str) -> list[str]:
    """The commands of the second part: of the engines' those of this one."""
    part = GUIDE.read_text().partition("## 2. ")[2].partition("\n## 3. ")[0]
    found = re.findall(r"^```sh ?(\S*)\n(.*?)^```$", part, re.M | re.S)
    assert {kind for kind, _ in found} == {"", *ENGINES}
    return [text for kind, text in found if kind in ("", engine)]


def elsewhere(text: str) -> str:
    """The same with ports that are free."""
    known = sorted({*PORT.findall(text), *re.findall(r"(?<=s/)\d{4}(?=/)|(?<=/)\d{4}(?=/ )", text)})
    ports = dict(zip(known, map(str, free_ports(len(known))), strict=True))
    return re.sub("|".join(known), lambda found: ports[found.group()], text)


def script(engine: str) -> tuple[str, list[list[str]]]:
    """What the shell is given, with a mark after each block; and what each says."""
    texts = blocks(engine)
    found = [[line.removeprefix(SAYS) for line in text.splitlines() if line.startswith(SAYS)] for text in texts]
    marked = "".join(f"{text}\necho '<<end {n}>>'\n" for n, text in enumerate(texts))
    activated = ". .venv/bin/activate "
    assert marked.count(activated) == 1
    return SLOW_ETCD + elsewhere(marked.replace(activated, ": ")), found


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.engines] if name in MODELS else []) for name in ENGINES]
)
def test_the_guide_does_what_it_says(engine: str, tmp_path: Path) -> None:
    if engine in MODELS and not (REAL / ENGINES[engine]).exists():
        pytest.skip(f"{engine} is not installed: run `make engines`")
    (tmp_path / "run.sh").write_text((given := script(engine))[0])
    last = [(REAL / ENGINES[engine]).parent] if engine in MODELS else []  # its own python must not be ours
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FARHOP_", "OTEL_"))}
    environment |= MODELS.get(engine, {})
    with commands(tmp_path, environment) as farhop:
        first = [farhop, Path(sys.executable).parent, find_binary().parent]
        environment["PATH"] = os.pathsep.join([*map(str, first), os.environ["PATH"], *map(str, last)])
        rest = output = _said(tmp_path, environment)
    for n, lines in enumerate(given[1]):
        text, mark, rest = rest.partition(f"<<end {n}>>\n")
        assert mark, f"block {n} did not end:\n{output}\n{_logs(tmp_path)}"
        plain = " ".join(text.split())
        at = 0
        for line in lines:
            found = plain.find(elsewhere_said(line), at)
            assert found >= 0, f"block {n} does not say {line!r}:\n{text}\n{_logs(tmp_path)}"
            at = found
        assert "Traceback" not in text


def _said(folder: Path, environment: dict[str, str]) -> str:
    """What the shell wrote, to its end."""
    shell = subprocess.Popen(
        ["bash", str(folder / "run.sh")], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        return shell.communicate(timeout=HANGS_S)[0]
    except subprocess.TimeoutExpired:
        _end(shell)
        output = shell.communicate()[0]
        pytest.fail(f"it did not come to its end:\n{output}\n{_logs(folder)}", pytrace=False)
    finally:
        _end(shell)


def elsewhere_said(line: str) -> str:
    """What is to be said holds no port."""
    assert not PORT.search(line)
    return " ".join(line.split())


def _end(shell: subprocess.Popen[str]) -> None:
    """Whatever the guide has left running: all of it is in the shell's own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)


def _logs(folder: Path) -> str:
    files = sorted((folder / "my-fleet").glob("*.log"))
    return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in files)
