"""What is learned from finished requests: sizes of prompts and answers, speeds, and how accurate predicted cache hits
were.

Never decides anything, and keeps nothing of a request but sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regional_lb.fleet.kv_events import TOKEN_BYTES
from regional_lb.scheduler.selector import shape_of

if TYPE_CHECKING:
    from farhop.balance.machine import AttemptEnded, Usage
    from regional_lb.fleet.replicas import Replicas
    from regional_lb.scheduler.request_state import RequestState

ANSWER_SHARE = 0.5  # of the tokens that an answer took; its text may have other bytes per token than prompts have


class Learning:
    """See the module's docstring. Over all answers that reported how much of their prompts was cached: what was
    predicted to be, and what was, in tokens.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.predicted_tokens = self.actual_tokens = 0.0

    def holds_answer(self, state: RequestState, event: AttemptEnded) -> bool:
        """Whether the replica's cache holds the answer right after its prompt, as the next turn will send it. If the
        engine generated far more tokens than were relayed, it was reasoning, and those tokens lie between the two."""
        if (
            event.fault is not None
            or state.replica in self._replicas.view.decode_only
            or len(event.chain) <= len(state.request.chain)
        ):
            return False
        tokens = event.usage.completion_tokens if event.usage is not None else 0
        return event.answer_bytes >= ANSWER_SHARE * tokens * self._replicas.estimates.bytes_per_token(
            state.request.model
        )

    def ended(self, state: RequestState, usage: Usage, now: float) -> bool:
        """Learn from a finished request's usage. Returns whether the mirror, corrected by it, lacks some of the
        prompt."""
        request, estimates, lacks = state.request, self._replicas.estimates, False
        estimates.now = now
        # Compared with the length expected by now: what was expected when it was sent may have been a guess, and its
        # share of a guess says nothing about answers whose length was learned.
        expected = estimates.output_tokens(request.tenant, request.model, request.max_tokens)
        estimates.learn(request.tenant, request.model, request.prompt_bytes, usage)
        decode_ms, service_ms = (now - state.prefilled_at) * 1e3, (now - state.forwarded_at) * 1e3
        self._replicas.served(state.replica, decode_ms, service_ms, usage.completion_tokens, state.load_since, now)
        self._replicas.answer_ended(state.replica, usage.completion_tokens, expected)
        pick = state.pick
        chosen = pick.chosen if pick is not None and pick.prefill is None else None
        if chosen is not None and (usage.cached_tokens is not None or usage.completion_tokens):
            # Embeddings, scores and transcripts never report it, also of engines whose texts do.
            predicted = 0.0 if chosen.exact else chosen.hit_tokens
            self._replicas.unreported_hits.answered(state.replica, predicted, reported=usage.cached_tokens is not None)
        if usage.cached_tokens is not None and chosen is not None:
            self.predicted_tokens += chosen.hit_tokens
            self.actual_tokens += usage.cached_tokens
            predicted_bytes = chosen.hit_tokens * state.need.bytes_per_token
            found_bytes = usage.cached_tokens / max(usage.prompt_tokens, 1) * request.prompt_bytes
            self._replicas.mirror.partial_blocks.learn(
                request.chain, request.prompt_bytes, predicted_bytes, found_bytes
            )
            lacks = not chosen.exact and self._replicas.mirror.overrated(
                state.replica, request.chain, state.need.bytes_per_token, chosen.hit_tokens, usage.cached_tokens
            )
            path, whole = state.need.path, request.tokens is not None and request.tokens.whole
            if chosen.exact and path is not None and (whole or self._replicas.blocks.ends_within(path)):
                held = self._replicas.blocks.known(path).exact.get(state.replica, 0.0)
                self._replicas.mirror.guard.cached(shape_of(request), chosen.hit_tokens, usage.cached_tokens, held)
        if request.tokens is not None and request.tokens.whole:
            self._replicas.mirror.guard.counted(
                shape_of(request), len(request.tokens.ids) // TOKEN_BYTES, usage.prompt_tokens
            )
        return lacks
