"""Pure arithmetic of balancing. Never does IO, reads a clock or rolls its own dice: `now` and `rng` are arguments."""
