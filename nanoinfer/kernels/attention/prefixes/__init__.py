"""Attention to a prefix that several rows share, read once for all."""
