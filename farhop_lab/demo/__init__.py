"""`make demo`: the default world and what it shows, a checked line each."""
