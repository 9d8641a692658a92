"""Lines of text to lines of text: reading, batches, search, and writing."""
