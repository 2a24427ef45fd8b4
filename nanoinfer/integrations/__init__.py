"""Libraries that call us: one small file for each."""
