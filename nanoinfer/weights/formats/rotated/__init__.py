"""Matrices between rotations, which a checkpoint's config asks for."""
