"""The emulated ocean: every path between two regions crosses a link with delay, jitter, cut and freeze; no root."""
