"""`farhop anycast`: announces an entry's prefixes while the entry is ready, and withdraws them when it no longer is."""
