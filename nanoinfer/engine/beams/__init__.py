"""Beam search: which beams go on is plain Python; forks of blocks compute them, while no request runs."""
