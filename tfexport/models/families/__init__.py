"""Checkpoint families: a table of names, and how the settings follow from the shapes."""
