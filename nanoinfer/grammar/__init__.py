"""Structured outputs by llguidance: what a form is compiled to, what tokens spell in it, and its errors told."""
