"""Attention of prompts, and of texts that are read."""
