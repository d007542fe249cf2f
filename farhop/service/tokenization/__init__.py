"""Prompts as their model's tokens. Never changes a body."""
