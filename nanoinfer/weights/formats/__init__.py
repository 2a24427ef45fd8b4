"""How checkpoints store matrices, and how products use them."""
