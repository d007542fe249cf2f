"""How fast an emulated GPU is and how much it remembers, for Llama-3.1-8B in bf16.

Pure figures: never reads a clock. Invariant: every time is >= 0 and every size is > 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Profile:
    """One GPU serving one 8B model. Times are milliseconds, sizes are tokens or blocks of tokens."""

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

    def __post_init__(self) -> None:
        times = (self.prefill_ms_per_token, self.decode_floor_ms, self.decode_ms_per_sequence, self.step_overhead_ms)
        if min(times) < 0:
            raise ValueError(f"profile {self.name}: a time is negative; give milliseconds >= 0")
        sizes = (
            self.kv_blocks,
            self.max_model_len,
            self.block_tokens,
            self.prefill_tokens_per_step,
            self.sequences_max,
        )
        if min(sizes) < 1:
            raise ValueError(f"profile {self.name}: a size is below 1; give whole numbers >= 1")

    @property
    def kv_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.kv_blocks * self.block_tokens

    @property
    def context_tokens(self) -> int:
        """The longest prompt plus answer: a vLLM refuses to start where one full context does not fit its KV cache."""
        return min(self.max_model_len, self.kv_tokens)

    def step_ms(self, prefill_tokens: int, decode_sequences: int) -> float:
        """Milliseconds of one pass over `prefill_tokens` prompt tokens and one token of each decoding sequence.

        The weights are read once per pass (`decode_floor_ms`, bound by memory) while prompt tokens are computed (bound
        by arithmetic): the two overlap, so the longer one counts. What each decoding sequence adds (reading its own
        KV, sampling) is overlapped by neither. So a mixed step costs about its prefill, and every decode in it waits
        that long: the stall that chunked prefill bounds and an overloaded replica shows between tokens.
        """
        pass_ms = max(self.decode_floor_ms, prefill_tokens * self.prefill_ms_per_token)
        return self.step_overhead_ms + pass_ms + decode_sequences * self.decode_ms_per_sequence

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
        )


# KV of one token of Llama-3.1-8B: 2 (K, V) x 32 layers x 8 heads x 128 x 2 B = 131,072 B.
# `decode_ms_per_sequence`: a sequence of ~1,000 tokens reads 131 MB of KV per step, plus ~0.03 ms of sampling and
# bookkeeping on the host: L4 131 MB / 300 GB/s = 0.44; A100 / 1,555 GB/s = 0.08; H100 / 3,350 GB/s = 0.04.
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        # 0.59 ms/token: 512 tokens take ~300 ms. 55 ms: 16 GB of weights at 300 GB/s. ~25k tokens of KV fit beside.
        Profile(
            name="l4",
            prefill_ms_per_token=0.59,
            decode_floor_ms=55.0,
            decode_ms_per_sequence=0.47,
            kv_blocks=1_562,
            max_model_len=16_384,
        ),
        # The slope of TTFT = 150.7 + 0.0938 n ms; its intercept is that set-up's wire and front end, which are not the
        # GPU's. 40 GB x 0.9 - 16 GB weights - 2 GB activations = 18 GB = 137k tokens.
        Profile(
            name="a100",
            prefill_ms_per_token=0.0938,
            decode_floor_ms=25.0,
            decode_ms_per_sequence=0.11,
            kv_blocks=8_580,
            max_model_len=32_768,
        ),
        # 80 GB x 0.9 - 16 GB - 2 GB = 54 GB = 412k tokens. vLLM's default budget of batched tokens is 8,192 there.
        Profile(
            name="h100",
            prefill_ms_per_token=0.04,
            decode_floor_ms=10.0,
            decode_ms_per_sequence=0.07,
            kv_blocks=25_750,
            max_model_len=131_072,
            prefill_tokens_per_step=8_192,
        ),
    )
}
