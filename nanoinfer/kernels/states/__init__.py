"""States that stand at a boundary, and rings beside them of the tokens since."""
