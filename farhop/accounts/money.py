"""Money in whole numbers: what tokens cost in picodollars each, sums in microdollars. Pure; knows no price book."""

from __future__ import annotations

import msgspec

PICO_OF_MICRO = 1_000_000


def usd(micro: int) -> str:
    """Microdollars in USD: exactly, and no longer than they need be."""
    whole, rest = divmod(micro, 1_000_000)
    return f"{whole:,}" + (f".{rest:06d}".rstrip("0") if rest else "")


class Rates(msgspec.Struct, frozen=True):
    """What a model's tokens cost, in whole picodollars a token, so that sums are exact: a millionth of a USD for a
    million tokens is the least that counts."""

    input: int
    cached: int
    output: int

    def micro_usd(self, fresh: int, cached: int, output: int) -> int:
        """The cost of tokens in microdollars, rounded up to a whole one.

        `fresh` and `cached`: prompt tokens that were computed and that were found in a KV cache; `output`: answer
        tokens.
        """
        return -(-(fresh * self.input + cached * self.cached + output * self.output) // PICO_OF_MICRO)

    def at_most(self, prompt: int, output: int) -> int:
        """The cost in microdollars if no prompt token is cached."""
        return -(-(prompt * max(self.input, self.cached) + output * self.output) // PICO_OF_MICRO)

    def output_within(self, micro_usd: int, prompt: int) -> int:
        """Of how many tokens an answer may be for this money, less the prompt's; below 0 where that alone is more."""
        left = micro_usd * PICO_OF_MICRO - prompt * max(self.input, self.cached)
        return left // self.output if self.output else left
