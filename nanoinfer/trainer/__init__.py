"""The trainer's side: the same numbers that a deterministic engine computes, with gradients."""
