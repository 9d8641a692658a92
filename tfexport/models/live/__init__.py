"""Reads a model from the user's live module: what its forward computes, not what names or flags say."""
