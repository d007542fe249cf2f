"""What vLLM's own scheduler decides, pass by pass, without a model: `vllm_schedules.py MODEL < loads > decisions`.

Run by the Python of vLLM's environment, so nothing of this project is imported. A load is a GPU's sizes and requests
(in which pass each comes, its prompt's tokens, how long its answer is); every answer is of tokens that nobody else has.
Told is, after each pass, of every request that is not finished how many tokens are computed and answered, and how often
there was preemption so far.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def scheduler(model: str, sizes: dict[str, int]) -> Scheduler:
    """As a server makes it, with so many blocks to give: it keeps one of them for itself."""
    block, most = sizes["block_tokens"], sizes["max_model_len"]
    model_config = ModelConfig(model=model, max_model_len=most)
    batches = SchedulerConfig(
        max_num_seqs=sizes["sequences_max"], max_num_batched_tokens=sizes["prefill_tokens_per_step"],
        max_model_len=most, is_encoder_decoder=False, enable_chunked_prefill=True, async_scheduling=False,
    )  # fmt: skip
    cache = CacheConfig(block_size=block, enable_prefix_caching=True)
    config = VllmConfig(scheduler_config=batches, model_config=model_config, cache_config=cache)
    cache.num_gpu_blocks = sizes["kv_blocks"] + 1
    layer = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config, log_stats=True, block_size=block,
        kv_cache_config=KVCacheConfig(cache.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def decisions(model: str, load: dict[str, Any]) -> list[Any]:
    """Of one load, pass by pass."""
    made, hasher = scheduler(model, load["sizes"]), get_request_block_hasher(load["sizes"]["block_tokens"], sha256)
    to_come, live, told, fresh, passes = load["requests"][::-1], {}, [], count(1 << 24), count()
    preemptions = 0
    while to_come or live:
        at = next(passes)
        while to_come and to_come[-1][0] <= at:
            _, name, prompt, answer = to_come.pop()
            wanted = SamplingParams(max_tokens=answer, ignore_eos=True)
            live[name] = Request(name, prompt, wanted, None, block_hasher=hasher)
            made.add_request(live[name])
        before = sum(one.num_preemptions for one in live.values())
        step = made.schedule()
        preemptions += sum(one.num_preemptions for one in live.values()) - before
        names = list(step.num_scheduled_tokens)
        whole = [live[name].num_computed_tokens >= live[name].num_tokens for name in names]
        made.update_from_output(step, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[next(fresh)] if speaks else [] for speaks in whole],
        ))  # fmt: skip
        live = {name: one for name, one in live.items() if not one.is_finished()}
        state = {name: [one.num_computed_tokens, one.num_output_tokens] for name, one in live.items()}
        told.append([state, preemptions])
    return told


if __name__ == "__main__":
    init_none_hash(sha256)
    json.dump([decisions(sys.argv[1], load) for load in json.load(sys.stdin)], sys.stdout)
