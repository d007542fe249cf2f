"""What clients ask, as programs of requests: chats, trees of thought, agents, traces. Start at `program`."""
