"""What becomes of projected queries, keys and values before they attend."""
