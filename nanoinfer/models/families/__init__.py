"""One short file a family: each reads a config.json and says what the model is."""
