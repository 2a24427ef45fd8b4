"""The command `python -m nanoinfer.check`: whether a checkpoint does the same here as in transformers."""
