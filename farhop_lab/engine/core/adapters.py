"""LoRA adapters as vLLM keeps them: any number registered, a few in GPU memory, and only those may be in a batch.

Pure. Invariants: at most `most` are loaded, and one that a running sequence uses is never unloaded; an adapter that is
not registered is no model. Loading one takes `load_ms`, during which the GPU does nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Set


class Adapters:
    """The adapters of one replica. `most`: how many fit a batch (vLLM's max_loras)."""

    def __init__(self, names: Iterable[str] = (), most: int = 1, load_ms: float = 0.0) -> None:
        if most < 1:
            raise ValueError(f"max_loras: {most} is below 1; one adapter at least must fit a batch")
        self.names = dict.fromkeys(names)
        self.most, self.load_ms = most, load_ms
        self.loads = 0
        self._loaded: OrderedDict[str, None] = OrderedDict()  # the least recently used first

    @property
    def loaded(self) -> tuple[str, ...]:
        """Those in GPU memory, the least recently used first."""
        return tuple(self._loaded)

    def register(self, name: str) -> bool:
        """Offer an adapter as a model; False if it is already."""
        if name in self.names:
            return False
        self.names[name] = None
        return True

    def unregister(self, name: str) -> bool:
        """Withdraw it; False if it was not registered."""
        if name not in self.names:
            return False
        del self.names[name]
        self._loaded.pop(name, None)
        return True

    def fits(self, name: str, used: Set[str]) -> bool:
        """Whether a sequence with this adapter ("" for none) may join a batch that uses those."""
        return not name or name in used or len(used) < self.most

    def use(self, name: str, used: Set[str]) -> float:
        """A sequence with it joins a batch that uses those. Returns the milliseconds to load it, 0 if it is loaded."""
        if not name:
            return 0.0
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return 0.0
        while len(self._loaded) >= self.most:
            del self._loaded[next(idle for idle in self._loaded if idle not in used)]
        self._loaded[name] = None
        self.loads += 1
        return self.load_ms
