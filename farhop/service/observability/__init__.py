"""Spans, metrics and decisions of requests. Never holds a prompt, never records what the law forbids."""
