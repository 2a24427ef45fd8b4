"""Matrix products, with the norm before them and the activation after."""
