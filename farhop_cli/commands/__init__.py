"""The wiring of every command, a module a group: options and help. What a command does is in the rooms it calls."""
