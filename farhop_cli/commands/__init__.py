"""The wiring of every command, a module a group: options and help. The work is done by the modules they import."""
