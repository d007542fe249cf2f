"""`farhop engine`: its options, which are the settings of emulated engines. Only declares them.

What is not given is the settings' own default: help names it in words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farhop_cli.commands.wiring import loading
from farhop_cli.help_page import App
from farhop_cli.options import PLAIN

app = App(**PLAIN)

Ports = Annotated[
    list[int] | None,
    typer.Option("--port", metavar="PORT", help="Port to listen on; may be repeated. 0: any free one. Default: 8001."),
]
Host = Annotated[
    str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on. Default: 127.0.0.1.")
]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="GPU", help="The GPU to emulate: l4, a100 or h100. Default: l4.")
]
Replicas = Annotated[
    int | None, typer.Option("--replicas", metavar="N", help="How many engines, on consecutive ports. Default: 1.")
]
Model = Annotated[str | None, typer.Option("--model", help="The served model's name. Default: llama-3.1-8b.")]
Speedup = Annotated[
    float | None,
    typer.Option("--speedup", metavar="FACTOR", help="How many times faster than the GPU. Default: 1."),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="SEED", help="Seed of what the engine writes. Default: 0.")]
Wide = Annotated[bool | None, typer.Option("--wide", help="Write more than ASCII: CJK, emoji, accents.")]
KvBlocks = Annotated[
    int | None,
    typer.Option("--kv-blocks", metavar="N", help="KV cache, in blocks of 16 tokens. Default: the GPU's."),
]
MeanOutputTokens = Annotated[
    float | None, typer.Option(metavar="N", help="Mean tokens of answers without max_tokens. Default: 200.")
]
Adapters = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="The name of a LoRA adapter; may be repeated.")
]
MaxLoras = Annotated[int | None, typer.Option(metavar="N", help="How many adapters fit into a batch. Default: 1.")]
LoraLoadMs = Annotated[
    float | None, typer.Option(metavar="MS", help="How long it takes to load an adapter. Default: 200.")
]
DisaggregationMode = Annotated[str | None, typer.Option(metavar="MODE", help="As in SGLang: prefill or decode.")]
BootstrapPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Where decode engines find a prefill engine. Default: 8998.")
]
DcgmPort = Annotated[int | None, typer.Option(metavar="PORT", help="Serve a DCGM exporter's page here.")]
KvEventsPort = Annotated[int | None, typer.Option(metavar="PORT", help="Publish KV events over ZMQ here.")]
KvReplayPort = Annotated[int | None, typer.Option(metavar="PORT", help="Replay KV events here.")]
KvEventsSchema = Annotated[
    str | None, typer.Option(metavar="SCHEMA", help="How KV events are encoded: map or array (old). Default: map.")
]
TokenizerFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Read prompts by this tokenizer.json.")]
WriteTokenizer = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write a tokenizer.json and a chat template there, and end.")
]


@app.command("engine", epilog="Example:  farhop engine --profile l4 --port 8001 --replicas 2 --speedup 10")
def run_engine(
    port: Ports = None,
    host: Host = None,
    profile: Profile = None,
    replicas: Replicas = None,
    model: Model = None,
    speedup: Speedup = None,
    seed: Seed = None,
    wide: Wide = None,
    kv_blocks: KvBlocks = None,
    mean_output_tokens: MeanOutputTokens = None,
    adapter: Adapters = None,
    max_loras: MaxLoras = None,
    lora_load_ms: LoraLoadMs = None,
    disaggregation_mode: DisaggregationMode = None,
    bootstrap_port: BootstrapPort = None,
    dcgm_port: DcgmPort = None,
    kv_events_port: KvEventsPort = None,
    kv_replay_port: KvReplayPort = None,
    kv_events_schema: KvEventsSchema = None,
    tokenizer: TokenizerFile = None,
    write_tokenizer: WriteTokenizer = None,
) -> None:
    """Run emulated engines: OpenAI-like servers with a GPU's timing and no GPU.

    `POST /lab/fault {"kind": "stuck", "for_s": 30}` breaks one (oom, fast-500, slow, stuck, dead-green, xid), DELETE
    mends it.
    """
    if write_tokenizer is not None:
        from farhop_lab.engine.tokenizer_file import write

        raise typer.Exit(write(write_tokenizer))
    with loading():
        from farhop_cli.engine import run

    run({
        "ports": port or [8001], "host": host, "profile": profile, "replicas": replicas, "model": model,
        "speedup": speedup, "seed": seed, "wide": wide, "kv_blocks": kv_blocks,
        "mean_output_tokens": mean_output_tokens, "dcgm_port": dcgm_port, "adapters": adapter,
        "max_loras": max_loras, "lora_load_ms": lora_load_ms,
        "kv_events_port": kv_events_port, "kv_replay_port": kv_replay_port, "kv_events_schema": kv_events_schema,
        "tokenizer": tokenizer, "disaggregation_mode": disaggregation_mode, "bootstrap_port": bootstrap_port,
    })  # fmt: skip
