"""Spans, metrics and logs. Never holds a prompt or an answer."""
