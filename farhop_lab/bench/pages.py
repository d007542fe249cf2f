"""Metrics pages of the size that real engines have: the metrics a balancer reads among histograms that it does not.

Names and labels are each engine's own, numbers are plausible, the histograms represent the dozens that every engine
has. For benchmarks and tests only.
"""

from __future__ import annotations

PAGE_BYTES = 60 * 1024
_MODEL = 'model_name="meta-llama/Llama-3.1-8B-Instruct"'
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_GPU = 'UUID="GPU-5f0c1d2e",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node-a"'

LINES: dict[str, tuple[str, ...]] = {
    "vllm": (
        f'vllm:num_requests_running{{engine="0",{_MODEL}}} 7.0',
        f'vllm:num_requests_waiting{{engine="0",{_MODEL}}} 3.0',
        f'vllm:kv_cache_usage_perc{{engine="0",{_MODEL}}} 0.25',
        f'vllm:prefix_cache_queries_total{{engine="0",{_MODEL}}} 1.2345678e+06',
        f'vllm:prefix_cache_hits_total{{engine="0",{_MODEL}}} 617283.0',
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27000"} 1.0',
    ),
    "sglang": (
        f'sglang:num_running_reqs{{dp_rank="0",{_MODEL},tp_rank="0"}} 7.0',
        f'sglang:num_queue_reqs{{dp_rank="0",{_MODEL},tp_rank="0"}} 3.0',
        f'sglang:token_usage{{dp_rank="0",{_MODEL},tp_rank="0"}} 0.25',
        f'sglang:max_total_num_tokens{{dp_rank="0",{_MODEL},tp_rank="0"}} 432000.0',
        f"sglang:prompt_tokens_total{{{_MODEL}}} 1.2345678e+06",
        f'sglang:cached_tokens_total{{cache_source="device",{_MODEL}}} 617283.0',
    ),
    "tgi": ("tgi_queue_size 3", "tgi_batch_current_size 7"),
    "trtllm": (
        f"trtllm_num_requests_running{{{_MODEL}}} 7.0",
        f"trtllm_num_requests_waiting{{{_MODEL}}} 3.0",
        f"trtllm_kv_cache_utilization{{{_MODEL}}} 0.25",
        f"trtllm_kv_cache_max_blocks{{{_MODEL}}} 13500.0",
        f"trtllm_kv_cache_tokens_per_block{{{_MODEL}}} 32.0",
    ),
    "lmdeploy": (
        f'lmdeploy:num_requests_running{{engine="0",{_MODEL}}} 7.0',
        f'lmdeploy:num_requests_waiting{{engine="0",{_MODEL}}} 2.0',
        f'lmdeploy:num_api_requests_waiting{{engine="0",{_MODEL}}} 1.0',
        f'lmdeploy:gpu_cache_usage_perc{{engine="0",{_MODEL}}} 0.25',
    ),
    "llamacpp": (
        "llamacpp:requests_processing 7",
        "llamacpp:requests_deferred 3",
        "llamacpp:prompt_tokens_total 617283",
        "llamacpp:prompt_tokens_cached_total 617283",
    ),
    "triton": (
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3',
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 7',
        f'{_BLOCKS}{{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"}} 0.25',
        f'{_BLOCKS}{{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"}} 64',
        f'{_BLOCKS}{{kv_cache_block_type="max",model="tensorrt_llm",version="1"}} 6750',
    ),
    "dcgm": (
        f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",{_GPU}}} 0',
        f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",{_GPU}}} 61',
        f'DCGM_FI_DEV_FB_FREE{{gpu="0",{_GPU}}} 4021',
    ),
}
LINES["aphrodite"] = tuple(line.replace("vllm:", "aphrodite:") for line in LINES["vllm"])
_STEMS = {"tgi": "tgi_", "trtllm": "trtllm_", "triton": "nv_", "dcgm": "DCGM_FI_DEV_"}


def page(engine: str, size: int = PAGE_BYTES) -> bytes:
    """A page of about `size` bytes: the metrics that are read are in the middle of the others."""
    stem = _STEMS.get(engine, f"{engine}:")
    words = "\n".join(LINES[engine]) + "\n"
    half = (size - len(words)) // 2
    return (_histograms(f"{stem}request_a", half) + words + _histograms(f"{stem}request_b", half)).encode()


def _histograms(stem: str, size: int) -> str:
    lines: list[str] = []
    left, number = size, 0
    while left > 0:
        name = f"{stem}{number}_seconds"
        family = [f"# HELP {name} Histogram of request phase {number} in seconds.", f"# TYPE {name} histogram"]
        family += [f'{name}_bucket{{engine="0",le="{2.0**n / 1e3:g}",{_MODEL}}} {n * 917}.0' for n in range(20)]
        family += [f'{name}_count{{engine="0",{_MODEL}}} 17423.0', f'{name}_sum{{engine="0",{_MODEL}}} 3812.55']
        left -= sum(map(len, family)) + len(family)
        number += 1
        lines += family
    return "\n".join(lines) + "\n"
