"""Request bodies and answers of each API, and the GPU exporter's page. Pure."""
