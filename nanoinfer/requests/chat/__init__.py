"""A chat becomes a text: its messages in the forms that a template takes, and the names that the template reads."""
