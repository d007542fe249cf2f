"""The number of requests that an engine runs at once, as it reports it: which page to ask, and how to read it. Pure.

TensorRT-LLM's metrics contain it, behind Triton, too (signals.engines). Other engines have a page for it: vLLM's
`/server_info` (only in development mode), SGLang's `/server_info` or `/get_server_info`, llama.cpp's `/props`, TGI's
`/info`, Triton's configuration of the model. Never guesses: an invalid value is omitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS_MAX = 1_000_000
_PAGE_BYTES_MAX, _LISTS_MAX = 256 * 1024, 8192  # lists and objects, and what looks like them in a template: 4 ms
_BATCH_THEMSELVES = ("tensorrtllm", "vllm")


def _vllm(page: Any) -> Any:
    return page["vllm_config"]["scheduler_config"]["max_num_seqs"]


def _sglang(page: Any) -> Any:
    """What its schedulers came to, one for each data-parallel rank; else what they were started with."""
    states = page.get("internal_states") or []
    found = [
        state.get("effective_max_running_requests_per_dp") or state.get("max_running_requests") for state in states
    ]
    return sum(found) if found and all(type(one) is int for one in found) else page.get("max_running_requests")


def _llama_cpp(page: Any) -> Any:
    return page["total_slots"]


def _tgi(page: Any) -> Any:
    """Its largest batch; without one it takes `max_concurrent_requests`, and refuses beyond."""
    return page.get("max_batch_size") or page["max_concurrent_requests"]


def _triton(page: Any) -> Any:
    """How many requests a model runs at once: each of its instances (a count for each of their GPUs) takes one request,
    or a batch if Triton batches requests. Only backends that batch by themselves know how many they take."""
    decoupled = (page.get("model_transaction_policy") or {}).get("decoupled")
    if decoupled or page.get("backend") in _BATCH_THEMSELVES:
        return None
    instances = sum(_count(group["count"]) * max(1, len(group.get("gpus") or ())) for group in page["instance_group"])
    return instances * max(1, page["max_batch_size"] if "dynamic_batching" in page else 1)


def _count(value: Any) -> int:
    """Anything else would be multiplied all the same: a text or list to more than there is memory."""
    if type(value) is not int:
        raise TypeError
    return value


# By the engine's name in configuration, or what it calls itself in /v1/models (`owned_by`).
PAGES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "vllm": (("/server_info?config_format=json",), _vllm),
    "sglang": (("/server_info", "/get_server_info"), _sglang),
    "llamacpp": (("/props",), _llama_cpp),
    "tgi": (("/info",), _tgi),
    "triton": (("/v2/models/{model}/config",), _triton),  # of each model
}
BY_MODEL = frozenset(("triton",))


def read_slots(engine: str, body: bytes) -> int | None:
    """The number in an answer from one of the engine's PAGES; None if it has none."""
    if len(body) > _PAGE_BYTES_MAX or body.count(b"[") + body.count(b"{") > _LISTS_MAX:
        return None
    try:
        slots = PAGES[engine][1](msgspec.json.decode(body))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):  # msgspec's own are ValueErrors
        return None
    return slots if type(slots) is int and 1 <= slots <= SLOTS_MAX else None
