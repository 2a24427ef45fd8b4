"""Families of experts whose routers correct the scores for the choice, after DeepSeek-V3 (DeepSeek-AI, 2024)."""
