"""The law in force, and what a change of it would do. Never moves to an earlier epoch."""
