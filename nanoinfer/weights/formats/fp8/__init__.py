"""Matrices in FP8."""
