"""Both tiers' shipped machines in virtual time: one seed, no clock, no sockets. Start at `world`."""
