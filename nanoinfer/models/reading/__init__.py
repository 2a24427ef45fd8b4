"""Reads a config.json: settings by themselves, and what several families share."""
