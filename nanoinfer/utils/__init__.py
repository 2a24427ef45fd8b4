"""What several layers share: per-step context, weight loading, the tensor-parallel group."""
