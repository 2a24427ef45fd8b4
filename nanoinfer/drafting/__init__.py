"""Guesses of the tokens that come next, which a decode step verifies."""
