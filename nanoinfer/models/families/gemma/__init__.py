"""Gemma: a file for its first three generations, and one for the fourth."""
