"""Search over any runtime, and text in and out."""
