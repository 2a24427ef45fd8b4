"""Guesses on the device: proposed from texts, packed into a step, accepted or not."""
