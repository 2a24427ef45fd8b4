"""Prompts, as callers give them, up to where they are ready to run."""
