"""What a step gives beside its tokens."""
