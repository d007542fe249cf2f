"""How many requests at once, in the words of each engine that says so."""

from __future__ import annotations

import tracemalloc

import pytest

from regional_lb.engines.signals.slots import PAGES, SLOTS_MAX, read_slots


@pytest.mark.parametrize(
    ("engine", "body", "slots"),
    [
        ("vllm", b'{"vllm_config":{"scheduler_config":{"max_num_seqs":128}},"vllm_env":{}}', 128),
        ("vllm", b'{"vllm_config":"model=..., max_num_seqs=128"}', None),
        ("sglang", b'{"max_running_requests":null,"internal_states":['
         b'{"effective_max_running_requests_per_dp":48},{"effective_max_running_requests_per_dp":48}]}', 96),
        ("sglang", b'{"max_running_requests":32,"internal_states":[{"memory_usage":{}}]}', 32),
        ("sglang", b'{"max_running_requests":null,"internal_states":[]}', None),
        ("llamacpp", b'{"total_slots":4,"model_path":"x.gguf"}', 4),
        ("tgi", b'{"max_concurrent_requests":128,"max_batch_size":null}', 128),
        ("tgi", b'{"max_concurrent_requests":128,"max_batch_size":8}', 8),
        ("triton", b'{"max_batch_size":8,"dynamic_batching":{},"instance_group":[{"count":2,"gpus":[0,1]}]}', 32),
        ("triton", b'{"max_batch_size":8,"instance_group":[{"count":1,"gpus":[]},{"count":2}]}', 3),
        ("triton", b'{"max_batch_size":0,"dynamic_batching":{},"instance_group":[{"count":1}],'
         b'"model_transaction_policy":{"decoupled":false}}', 1),
        ("triton", b'{"max_batch_size":0,"instance_group":[{"count":1}],"model_transaction_policy":{"decoupled":true}}',
         None),
        ("triton", b'{"backend":"vllm","max_batch_size":0,"instance_group":[{"count":1}]}', None),
        ("triton", b'{"platform":"ensemble","max_batch_size":8,"instance_group":[]}', None),
    ],
)  # fmt: skip
def test_each_engines_own_page(engine: str, body: bytes, slots: int | None) -> None:
    assert read_slots(engine, body) == slots


@pytest.mark.parametrize("engine", PAGES)
@pytest.mark.parametrize("body", [b"", b"7", b"null", b"[]", b"{}", b"<html>", b"\xff", b"[" * 100_000])
def test_a_page_without_a_slot_count_gives_none(engine: str, body: bytes) -> None:
    assert read_slots(engine, body) is None


@pytest.mark.parametrize("count", [b'"aaaa"', b"[0,0,0,0]", b"2.5", b"true", b"null"])
def test_an_instance_count_that_is_no_number_is_refused_without_using_memory(count: bytes) -> None:
    """A long text or list, so many times, is more than a machine has memory."""
    gpus = b"[" + b"0," * 1000 + b"0]"
    tracemalloc.start()
    try:
        body = b'{"max_batch_size":1,"instance_group":[{"count":%b,"gpus":%b}]}' % (
            count.replace(b"aaaa", b"a" * 100_000).replace(b"0,", b"0," * 10_000), gpus
        )  # fmt: skip
        assert read_slots("triton", body) is None
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("word", [b"0", b"-1", b"true", b"1.5", b'"4"', b"%d" % (SLOTS_MAX + 1)])
def test_a_page_that_makes_no_sense_gives_no_slots(word: bytes) -> None:
    assert read_slots("llamacpp", b'{"total_slots":%b}' % word) is None


@pytest.mark.parametrize("page", [b'{"a":[' + b"[]," * 60_000 + b"1]", b'{"a":"' + b"x" * 300_000 + b'"'])
def test_oversized_page_is_ignored(page: bytes) -> None:
    """1 MiB of lists took 170 ms to build, and 200 KB 30."""
    assert read_slots("llamacpp", page + b',"total_slots":4}') is None
    assert read_slots("llamacpp", b'{"a":"' + b"{" * 5000 + b'","total_slots":4}') == 4  # a template
