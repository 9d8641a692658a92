"""Methods of HTTP."""

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing (RFC 9110, 9.2.1)."""
