"""Families whose cache has one latent a token for all heads."""
