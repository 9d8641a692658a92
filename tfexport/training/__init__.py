"""Training of the canonical model on parallel text."""
