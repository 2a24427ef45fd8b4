"""Audio as users give it, what each model makes of it, and what stands for it in a prompt."""
