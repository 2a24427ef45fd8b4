"""Attention of a decode step of one row."""
