"""The folder that an export writes and every runtime reads."""
