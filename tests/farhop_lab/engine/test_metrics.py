"""The page has vLLM's names, types and labels, and the numbers of the core behind it."""

from prometheus_client.parser import text_string_to_metric_families

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.metrics import Durations, Exposition, Observations

TYPES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
}


def test_names_types_labels_and_values() -> None:
    core, seen = EngineCore(PROFILES["l4"]), Observations()
    for name in "ab":
        core.submit(Sequence(name, EngineRequest(b"x" * 64 * 8, max_tokens=2), TextModel("m"), core.profile), 0)
    core.step(0)
    core.abort("b")
    seen.ttft.observe(0.3)
    families = {
        family.name: family for family in text_string_to_metric_families(Exposition(core, seen, "m").page().decode())
    }
    assert {name: family.type for name, family in families.items()} == TYPES
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    assert samples["vllm:num_requests_running"].value == 1
    assert samples["vllm:num_requests_running"].labels == {"engine": "0", "model_name": "m"}
    assert samples["vllm:prompt_tokens_total"].value == 256
    assert samples["vllm:prefix_cache_queries_total"].value == 256
    assert samples["vllm:prefix_cache_hits_total"].value == 112  # all but the block of b's last token
    assert samples["vllm:kv_cache_usage_perc"].value == 8 / 1_562
    config = samples["vllm:cache_config_info"].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "1562")
    reasons = {sample.labels["finished_reason"]: sample.value for sample in families["vllm:request_success"].samples}
    assert reasons == {"stop": 0, "length": 0, "abort": 1}
    assert samples["vllm:time_to_first_token_seconds_sum"].value == 0.3


def test_a_bound_belongs_to_its_bucket_and_counts_add_up() -> None:
    durations = Durations((0.1, 0.5))
    for seconds in (0.05, 0.1, 0.3, 9.0):
        durations.observe(seconds)
    assert durations.cumulative() == [("0.1", 2.0), ("0.5", 3.0), ("+Inf", 4.0)]
    assert durations.sum_s == 9.45
