"""HTTP servers under load: `tfexport serve` beside the same model behind LitServe. See `__main__.py`."""

OURS = "tfexport serve"
"""What names of the servers with continuous batching begin with."""
