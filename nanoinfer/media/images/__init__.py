"""Images as users give them, what each model makes of one, and what stands for it in a prompt."""
