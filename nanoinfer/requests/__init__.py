"""A request on its way: what the user gave, checked; its samples and their texts; what the user gets."""
