"""The engine without its sockets: scheduler, KV cache, texts, physics, faults. Pure: server and simulator drive it."""
