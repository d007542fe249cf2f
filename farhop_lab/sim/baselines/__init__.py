"""Published routers as machines of the simulator, each named for its source. Start at `world.build`."""
