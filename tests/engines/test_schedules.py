"""The emulated engine decides as vLLM's own scheduler does, pass by pass: who is admitted, who is preempted, what of a
prompt is found cached and how much of it is computed in one pass, where KV is short. Without a model on either side."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import real

from farhop_lab.engine.core.profiles import Profile
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel

pytestmark = pytest.mark.engines

LOADS = 24
BLOCK = 16


def _load(seed: int) -> dict[str, Any]:
    """Prompts of which some begin alike, answers short and long, together more than the cache holds. No prompt ends
    with a block: of two alike the last block would be computed twice, and vLLM would hold both."""
    rng = random.Random(seed)
    blocks = rng.randrange(40, 160)
    sizes = {
        "kv_blocks": blocks, "block_tokens": BLOCK, "max_model_len": BLOCK * blocks,
        "prefill_tokens_per_step": rng.choice([64, 256, 1024]), "sequences_max": rng.choice([4, 16, 64]),
    }  # fmt: skip
    heads = [rng.choices(range(5, 600), k=BLOCK * rng.randrange(1, 12)) for _ in range(3)]
    requests, at = [], 0
    for number in range(40):
        prompt = [*rng.choice([[], *heads]), *rng.choices(range(5, 600), k=rng.randrange(1, BLOCK * blocks // 4))]
        prompt += [600] * (len(prompt) % BLOCK == 0)
        answer = rng.choice([rng.randrange(1, 30), rng.randrange(1, BLOCK * blocks // 3)])
        requests.append([at, f"r{number}", prompt, answer])
        at += rng.choice([0, 0, 3, 20])
    return {"sizes": sizes, "requests": requests}


def _ours(load: dict[str, Any]) -> list[Any]:
    gpu = Profile("like", 1.0, 1.0, 0.0, **load["sizes"])
    core, live, told = EngineCore(gpu), dict[str, Sequence](), list[Any]()
    to_come = load["requests"][::-1]
    while to_come or live:
        while to_come and to_come[-1][0] <= len(told):
            _, name, prompt, answer = to_come.pop()
            wanted = EngineRequest(b"", answer, ignore_eos=True, ids=struct.pack(f"<{len(prompt)}I", *prompt))
            live[name] = Sequence(name, wanted, TextModel("m", seed=int(name[1:])), gpu)
            core.submit(live[name], 0.0)
        core.step(0.0)
        core.end_step()
        live = {name: one for name, one in live.items() if one.finished is None}
        state = {name: [one.computed_tokens, one.output_tokens] for name, one in live.items()}
        told.append([state, core.counters.preemptions])
    return told


def test_the_emulated_scheduler_decides_as_vllm_does(tmp_path: Path) -> None:
    if not real.VLLM.exists():
        pytest.skip(f"vLLM is {real.MISSING}")
    loads = [_load(seed) for seed in range(LOADS)]
    command = [str(real.VLLM), str(Path(__file__).with_name("vllm_schedules.py")), str(real.MODEL)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    with (tmp_path / "log").open("wb") as log:
        out = subprocess.run(
            command, input=json.dumps(loads).encode(), env=environment, stdout=subprocess.PIPE, stderr=log, check=True
        ).stdout
    preempted = 0
    for seed, (load, theirs) in enumerate(zip(loads, json.loads(out.splitlines()[-1]), strict=True)):
        for at, (our, their) in enumerate(zip(_ours(load), theirs, strict=False)):
            assert our == their, f"load {seed}, pass {at}"
        preempted += theirs[-1][1]
    assert preempted > 100  # otherwise nothing was tested
