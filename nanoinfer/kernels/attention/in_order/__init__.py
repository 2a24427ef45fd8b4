"""Attention whose every sum has one order, for deterministic=True."""
