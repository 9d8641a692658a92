"""Compares the speed of a bundle with that of other engines."""
