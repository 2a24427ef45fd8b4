"""The host's part in speculation: bounds of how far rows come, places for guesses, and slots for texts."""
