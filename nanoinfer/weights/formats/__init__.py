"""Formats of weights: how checkpoints store matrices."""
