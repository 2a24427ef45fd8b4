"""Weights of four or eight bits, whose groups of neighbouring inputs share a scale."""
