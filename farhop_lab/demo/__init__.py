"""`make demo`: the default world and its checks, a line each."""
