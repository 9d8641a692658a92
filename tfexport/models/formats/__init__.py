"""File formats. No code from a file is executed."""
