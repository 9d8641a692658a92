"""File formats. Nothing from a file is ever executed."""
