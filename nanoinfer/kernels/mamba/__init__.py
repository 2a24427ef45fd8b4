"""Mamba2's states (Dao and Gu, 2024): decode steps, and prompts in chunks."""
