"""The modules that models are built from, each split over the tensor-parallel ranks."""
