"""Pooling: what is read of a text in place of tokens, and how checkpoints say it."""
