"""Serving a bundle."""
