"""GuideLLM and AIPerf, unmodified, measure what stands behind both tiers: every request is answered and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clients import KEY, Entry, program, run
from real import MODEL

pytestmark = [pytest.mark.engines, pytest.mark.parametrize("entry", ["emulated", "vllm"], indirect=True)]

N_REQUESTS = 8


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_guidellm(entry: Entry, path: str, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={entry.url},model=tiny,api_key={KEY},request_format={path}"
    await run(
        entry, program("guidellm", "guidellm"), "run", "--backend", backend, "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={N_REQUESTS}", "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8", "--output", "kind=json,path=report.json",
        "--disable-console", folder=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (N_REQUESTS, 0, 0)
    await entry.both.at_rest()


@pytest.mark.parametrize("kind", ["chat", "messages"])
async def test_aiperf(entry: Entry, kind: str, tmp_path: Path) -> None:
    """Greedy, and of one seed: an answer without a word, as a model of random weights gives one in a hundred runs, is
    no request that it counts ("no responses with actual content")."""
    await run(
        entry, program("aiperf", "aiperf"), "profile", "--model", "tiny", "--url", entry.url, "--endpoint-type", kind,
        "--streaming", "--api-key", KEY, "--tokenizer", MODEL, "--concurrency", 2, "--request-count", N_REQUESTS,
        "--isl", 64, "--osl", 8, "--extra-inputs", "temperature:0", "--random-seed", 11,
        "--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", tmp_path / "out",
        folder=tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert (report["request_count"]["avg"], report.get("error_summary") or []) == (N_REQUESTS, [])
    await entry.both.at_rest()
