"""What one rank's device does to verify guesses: the texts, the places of guesses in a step, and the sizes of steps."""
