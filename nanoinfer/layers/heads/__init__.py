"""What stands behind the last layer: the heads of classifiers, and what a head's input goes through."""
