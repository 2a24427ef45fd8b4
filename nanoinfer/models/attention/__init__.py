"""Attention as layers of a model have it."""
