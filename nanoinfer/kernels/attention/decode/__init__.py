"""Attention of decode steps: one token a row, and its guesses."""
