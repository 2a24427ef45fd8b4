"""What attention over latents has of its own: their keys' way into the cache."""
