"""Text as people have it: taken apart into sentences, and put together again. Nothing here knows a model."""
