"""Makes the tiny models that real engines are run with: random weights, a tokenizer trained on this project's docs.

Run by the Python of the engines' own environment (tests/engines/install.py): `tiny.py FOLDER`. Written are `model` (a
two-layer Llama as transformers keep it), `lora` (a random adapter of it) and, if the package `gguf` is there,
`model.gguf`. Never fetches anything; the same seed gives the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 640, 128, 256, 2, 4, 2, 32, 8192
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

# As today's templates do: tools are written as JSON, and calls of tools with their arguments; no `developer`.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>' }}{{- call.function | tojson }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>\\n' }}{%- endif %}
{%- endif %}"""


def tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE of some 600 words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)


def model(folder: Path) -> None:
    """A Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(15)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def lora(folder: Path, base: Path) -> None:
    """An adapter of rank 8 over the projections of attention, by hand: its two files are all that an engine reads."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(16)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    weights = {}
    for layer in range(LAYERS):
        for name, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, HIDDEN, dtype=torch.bfloat16)
            weights[f"{at}.lora_B.weight"] = torch.randn(size, 8, dtype=torch.bfloat16)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": 8, "lora_alpha": 16,
        "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(sizes), "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def gguf(file: Path, base: Path) -> None:
    """The same weights in llama.cpp's format."""
    from gguf import GGUFWriter, TokenType
    from safetensors import safe_open

    writer = GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    document = json.loads((base / "tokenizer.json").read_text())
    words = sorted(document["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [word for word, _ in words] + [f"<|unused_{n}|>" for n in range(len(words), VOCABULARY)]
    kinds = [TokenType.CONTROL if word in SPECIAL else TokenType.NORMAL for word in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(LAYERS):
        before, after = f"model.layers.{layer}", f"blk.{layer}"
        for theirs, ours in (
            ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
        ):  # fmt: skip
            names[f"{before}.{theirs}"] = f"{after}.{ours}"
    with safe_open(str(base / "model.safetensors"), "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", weights.get_tensor(name).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder: Path) -> None:
    """Everything, into `folder`."""
    docs = Path(__file__).parents[2] / "docs"
    tokenizer(folder / "model", [page.read_text() for page in sorted(docs.rglob("*.md"))])
    model(folder / "model")
    lora(folder / "lora", folder / "model")
    try:
        import gguf as _  # noqa: F401
    except ImportError:
        return
    gguf(folder / "model.gguf", folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
