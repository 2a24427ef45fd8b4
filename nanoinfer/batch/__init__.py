"""Batch files: a file of prompts in, a file of results out, resumed wherever it was broken off."""

from nanoinfer.batch.job import Summary, run

__all__ = ["Summary", "run"]
