"""Matrices of the model's dtype."""
