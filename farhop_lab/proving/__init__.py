"""The proving ground: scenarios over routers and seeds, what comes of them, and what follows. Start at `cell`."""
