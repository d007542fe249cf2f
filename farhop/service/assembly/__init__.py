"""Builds the parts of a process from its checked configuration. Never decides a default."""
