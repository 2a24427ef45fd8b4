"""Sequences whose texts keep to a grammar, at once or behind a thought."""
