"""Worlds to run both tiers in: emulated engines, a collector of spans, a whole fleet on one machine, the demo."""
