"""The engine without its sockets: scheduler, KV cache, texts, timing, faults. Pure: server and simulator drive it."""
