"""An emulated inference engine: HTTP, metrics, spans and scheduler of a vLLM, without a GPU."""
