"""What to simulate, as files: their shape, what their parts refer to, and the ready-made ones beside this module."""
