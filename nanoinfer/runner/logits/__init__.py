"""Rows that ask for more than a temperature: logits processors, and log-probabilities."""
