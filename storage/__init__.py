"""Formats and places: what passes between stages, and where it lies."""
