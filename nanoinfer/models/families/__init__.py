"""One short file for each family: its functions read a config.json and return a Description of the model."""
