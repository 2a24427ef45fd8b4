"""What comes of a step: its figures, its faults, and what sequences get beside their tokens."""
