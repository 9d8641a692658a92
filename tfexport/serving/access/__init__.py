"""Who may ask, how often and how much: API keys and limits."""
