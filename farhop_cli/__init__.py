"""The `farhop` command. Wiring and tables only."""
