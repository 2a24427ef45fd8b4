"""Encoders: they read texts in both directions, and continue none."""
