"""Speed and memory of emulated GPUs, for Llama-3.1-8B in bf16.

Pure figures: never reads a clock. Invariant: every time is >= 0 and every size is > 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Profile:
    """One GPU serving one 8B model. Times are milliseconds, sizes are tokens or blocks of tokens.

    `attention_tokens`: the context length at which a token costs twice what the first one does; None: attention costs
    nothing. `kv_read_ms_per_token`: what each token of a decoding sequence's context adds to a step.
    """

    name: str
    prefill_ms_per_token: float
    decode_floor_ms: float
    decode_ms_per_sequence: float
    kv_blocks: int
    max_model_len: int
    block_tokens: int = 16
    prefill_tokens_per_step: int = 2048
    sequences_max: int = 256
    step_overhead_ms: float = 1.0
    attention_tokens: float | None = None
    kv_read_ms_per_token: float = 0.0

    def __post_init__(self) -> None:
        times = (
            self.prefill_ms_per_token,
            self.decode_floor_ms,
            self.decode_ms_per_sequence,
            self.step_overhead_ms,
            self.kv_read_ms_per_token,
        )
        if min(times) < 0:
            raise ValueError(f"profile {self.name}: a time is negative; give milliseconds >= 0")
        sizes = (
            self.kv_blocks,
            self.max_model_len,
            self.block_tokens,
            self.prefill_tokens_per_step,
            self.sequences_max,
        )
        if min(sizes) < 1 or (self.attention_tokens is not None and self.attention_tokens < 1):
            raise ValueError(f"profile {self.name}: a size is below 1; give whole numbers >= 1")

    @property
    def kv_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.kv_blocks * self.block_tokens

    @property
    def context_tokens(self) -> int:
        """The longest prompt plus answer: a vLLM refuses to start where one full context does not fit its KV cache."""
        return min(self.max_model_len, self.kv_tokens)

    def prefill_ms(self, tokens: float, since: float = 0.0) -> float:
        """Milliseconds of arithmetic for `tokens` of a text behind its first `since`: linear in the tokens for the
        weights, and for attention in the pairs of each with all before it.
        """
        pairs = tokens * (since + tokens / 2.0) if self.attention_tokens is not None else 0.0
        return self.prefill_ms_per_token * (tokens + pairs / (self.attention_tokens or 1.0))

    def step_ms(self, prefill_ms: float, decode_sequences: int, context_tokens: int = 0) -> float:
        """Milliseconds of one step over prompt tokens that take `prefill_ms` to compute and one token of each decoding
        sequence, which hold `context_tokens` in all.

        The weights are read once per step (`decode_floor_ms`, bound by memory) while prompt tokens are computed (bound
        by arithmetic): the two overlap, so the longer one counts. What each decoding sequence adds (reading its own KV,
        sampling) overlaps with neither. So a mixed step costs about its prefill, and every decode in it waits that
        long: the stall that chunked prefill bounds and an overloaded replica shows between tokens.
        """
        pass_ms = max(self.decode_floor_ms, prefill_ms)
        own_ms = decode_sequences * self.decode_ms_per_sequence + context_tokens * self.kv_read_ms_per_token
        return self.step_overhead_ms + pass_ms + own_ms

    def scaled(self, speedup: float) -> Profile:
        """The same GPU with every time divided by `speedup` (> 0); sizes stay."""
        if not 0 < speedup < float("inf"):
            raise ValueError(f"speedup: {speedup} is not a positive number; 1.0 is real time, 10 is ten times faster")
        return replace(
            self,
            prefill_ms_per_token=self.prefill_ms_per_token / speedup,
            decode_floor_ms=self.decode_floor_ms / speedup,
            decode_ms_per_sequence=self.decode_ms_per_sequence / speedup,
            step_overhead_ms=self.step_overhead_ms / speedup,
            kv_read_ms_per_token=self.kv_read_ms_per_token / speedup,
        )


# A token costs 2 x 8.03e9 FLOPs for the weights and 4 x 4,096 x 32 = 524,288 for each token that it attends to: as much
# again after 30,633 tokens, so that 100k tokens take 2.6 times what their number says (as large matrices run; FLOPs as
# Kaplan et al. count them, arXiv 2001.08361, section 2.1).
ATTENTION_TOKENS = 2 * 8.03e9 / 524_288
# KV of one token of Llama-3.1-8B: 2 (K, V) x 32 layers x 8 heads x 128 x 2 B.
KV_BYTES = 131_072
# Sampling and bookkeeping on the host.
SEQUENCE_MS = 0.03
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        # 0.59 ms/token: 512 tokens take ~300 ms. 55 ms: 16 GB of weights at 300 GB/s. ~25k tokens of KV fit beside.
        Profile(
            name="l4",
            prefill_ms_per_token=0.59,
            decode_floor_ms=55.0,
            decode_ms_per_sequence=SEQUENCE_MS,
            attention_tokens=ATTENTION_TOKENS,
            kv_read_ms_per_token=KV_BYTES / 300e6,  # 300 GB/s
            kv_blocks=1_562,
            max_model_len=16_384,
        ),
        # The slope of TTFT = 150.7 + 0.0938 n ms; its intercept is that set-up's network and front end, not the GPU's.
        # 40 GB x 0.9 - 16 GB weights - 2 GB activations = 18 GB = 137k tokens. vLLM 0.23 decodes this model on a 40 GB
        # A100 at 75 tokens/s, 77 % of what its bandwidth allows, with 1,024 tokens in (J. Musgrave, "vLLM
        # throughput-latency sweep on NVIDIA A100", 2026): 13.3 ms a token, of which 1.0 is overhead and 0.1 the KV's.
        Profile(
            name="a100",
            prefill_ms_per_token=0.0938,
            decode_floor_ms=12.2,
            decode_ms_per_sequence=SEQUENCE_MS,
            attention_tokens=ATTENTION_TOKENS,
            kv_read_ms_per_token=KV_BYTES / 1_555e6,  # 1,555 GB/s
            kv_blocks=8_580,
            max_model_len=32_768,
        ),
        # 80 GB x 0.9 - 16 GB - 2 GB = 54 GB = 412k tokens. vLLM's default budget of batched tokens is 8,192 there. Its
        # floor is the A100's efficiency of its own bandwidth: 16.06 GB / (0.77 x 3,350 GB/s).
        Profile(
            name="h100",
            prefill_ms_per_token=0.04,
            decode_floor_ms=6.2,
            decode_ms_per_sequence=SEQUENCE_MS,
            attention_tokens=ATTENTION_TOKENS,
            kv_read_ms_per_token=KV_BYTES / 3_350e6,  # 3,350 GB/s
            kv_blocks=25_750,
            max_model_len=131_072,
            prefill_tokens_per_step=8_192,
        ),
    )
}
