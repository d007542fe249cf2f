"""Histories: what both tiers' machines were told and what they decided, kept in files and replayed against this code.

A change that should change no decision is seen if it does; one that should shows what it changes. Never part of the
product.
"""
