"""Texts whose next token can be guessed at a given rate, for bench.py."""
