"""Access control: API keys and limits."""
