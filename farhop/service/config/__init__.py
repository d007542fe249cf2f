"""The configuration that processes share, and the certificates that it names. Never opens a connection."""
