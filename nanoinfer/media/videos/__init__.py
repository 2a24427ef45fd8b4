"""Videos: frames as users give them, how large each model makes these, and what stands for them in a prompt."""
