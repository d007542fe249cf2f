"""What goes over an engine's sockets, pure: request bodies and answers of each API, and the GPU exporter's page."""
