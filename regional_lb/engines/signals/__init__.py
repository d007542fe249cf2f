"""What engines and GPUs say of themselves on their metrics pages: reading the text, and what each engine's names mean.

Never trusts a value outside its domain and never opens a connection.
"""
