"""Metrics pages of engines and GPUs: parsing the text, and the meaning of each engine's metric names.

Never trusts a value outside its domain and never opens a connection.
"""
