"""What this region's report says of each model: its capacity, how much of it is in use, how long requests wait.

Read from the state machine; nothing is published here, and nothing changed.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from farhop.store.documents.report import BASES_LIMIT, RATE_LIMIT_MS, USED_LIMIT, WAIT_LIMIT_MS, ModelReport
from regional_lb.fleet.table import LEAST, TOTAL
from regional_lb.scheduler import admission

if TYPE_CHECKING:
    from farhop.balance.model_facts import ModelFacts
    from regional_lb.scheduler.flow import RegionalFlow

_BASES_LETTERS_MAX = 2048  # of one model: with 256 of them a report stays within what global balancers take


class ModelReports:
    """See the module's docstring."""

    def __init__(self, flow: RegionalFlow) -> None:
        self._flow = flow
        self._served_view = flow.replicas.view
        self._served: dict[str, tuple[tuple[str, ...], ModelFacts]] = {}

    def of(self, model: str, now: float) -> ModelReport:
        """The report on one model of the view."""
        flow = self._flow
        waits, eligibility = flow.wait_estimate, flow.eligibility
        replicas = flow.replicas.view.by_model[model]
        ready, queued = eligibility.offered(model, now), waits.queued(model)
        owned, shares = eligibility.owned(model, now), flow.replicas.shares
        if len(ready):
            least = int(ready.tpot_ms.argmin())
            prefill_ms, tpot_ms = float(LEAST(ready.prefill_ms_per_token)), ready.tpot_ms.item(least)
            batch_interference_ms = ready.batch_interference_ms.item(least)
        else:
            prefill_ms = min(flow.replicas.speeds[name].prefill_ms_per_token for name in replicas)
            tpot_ms, batch_interference_ms = min(flow.replicas.speeds[name].tpot_ms for name in replicas), 0.0
        bases = flow.law.lineage.get(model, frozenset())
        if bases is not None and (len(bases) > BASES_LIMIT or sum(map(len, bases)) > _BASES_LETTERS_MAX):
            bases = None  # a base left out would not bind: then report the bases as unknown
        gpus, facts = self._served_by(model)
        longest = flow.replicas.most_context_tokens(model, ready.of.names)
        sums = owned.sums()
        left = admission.headroom(owned, flow.config.foreign.reserve_share, sums)
        return ModelReport(
            model=model,
            replicas_ready=len(owned),
            replicas_total=len(replicas) if shares is None else sum(map(shares.owns, replicas)),
            slots_total=int(sums.slots),
            slots_free=left.slots_free,
            kv_tokens_total=int(sums.kv_tokens),
            kv_tokens_free=int(TOTAL(np.maximum(owned.kv_tokens - owned.kv_taken_tokens, 0.0))),
            in_flight=int(sums.in_flight),
            queued_requests=queued,
            queued_tokens=int(flow.queue.tokens),
            wait_ms=min(waits.wait_ms(model, now), WAIT_LIMIT_MS),
            prefill_ms_per_token=min(RATE_LIMIT_MS, prefill_ms),
            tpot_ms=min(RATE_LIMIT_MS, tpot_ms),
            bytes_per_token=flow.replicas.estimates.bytes_per_token(model),
            usable_share=len(ready) / len(replicas),
            headroom_foreign_tokens=int(left.kv_tokens * flow.foreign_admission.open_share(model, now))
            if left.slots
            else 0,
            batch_interference_ms=min(RATE_LIMIT_MS, batch_interference_ms),
            used_share=min(waits.used_share(model, now), USED_LIMIT),
            gpu_types=gpus,
            bases=tuple(sorted(bases)) if bases else (),
            base_unknown=bases is None,
            max_model_len=facts.max_model_len,
            root=facts.root,
            parent=facts.parent,
            context_tokens=int(longest) if longest < inf else 0,
            foreign_wait_ms=min(waits.foreign_wait_ms(model, now), WAIT_LIMIT_MS) if flow.queue.by_id else 0.0,
            **flow.scaling.reported(model),
        )

    def _served_by(self, model: str) -> tuple[tuple[str, ...], ModelFacts]:
        """The kinds of GPU that serve the model, and what their engines say of it, computed once for each view, since
        20 reports a second are built."""
        view = self._flow.replicas.view
        if view is not self._served_view:
            self._served_view, self._served = view, {}
        if model not in self._served:
            replicas = (view.replicas[name] for name in view.by_model[model])
            gpus = tuple(sorted({replica.gpu for replica in replicas if replica.gpu}))
            self._served[model] = gpus, view.facts(model)
        return self._served[model]
