"""Readers of the models that toolkits save, with their settings and vocabularies."""
