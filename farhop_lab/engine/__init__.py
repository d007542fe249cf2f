"""An emulated inference engine: from outside a vLLM (HTTP, metrics, spans), inside its scheduler and no GPU."""
