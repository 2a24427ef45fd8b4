"""Norms, alone or after an addition."""
