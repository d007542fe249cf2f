"""The decisions: when a prefix is announced, drained and withdrawn. Pure: no IO, no clock, no randomness."""
