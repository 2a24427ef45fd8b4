"""This process: its environment, its interrupts, its garbage, and how it comes to its GPU."""
