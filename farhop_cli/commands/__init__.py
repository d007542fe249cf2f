"""Declares every command, one module for each group: its options and help. The modules that they import do the work."""
