"""Life cycle, clock and background tasks of a process. Never knows a request."""
