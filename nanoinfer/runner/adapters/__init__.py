"""The adapters that one rank holds."""
