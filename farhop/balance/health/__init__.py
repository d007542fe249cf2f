"""Whether a target may take work, and how it comes back. Never probes, never reads a clock."""
