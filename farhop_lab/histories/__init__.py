"""Histories: both tiers' machines' events and commands, kept in files and replayed against the present code.

A refactor that changes a decision is found; a change of policy shows which decisions it changes. Never part of the
product.
"""
