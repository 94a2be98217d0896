"""Engines for training and for generation, and their placement with Ray. Only this package uses their internals."""
