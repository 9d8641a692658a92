"""The web page at `/`."""
