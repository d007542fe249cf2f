"""Scenario files: their schema, their references, and the ready-made ones beside this module."""
