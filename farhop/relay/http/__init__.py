"""HTTP/1.1 on the wire, and the client's connections. Never knows what a body means."""
