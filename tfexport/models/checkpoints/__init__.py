"""Checkpoint files in, canonical weights and a complete `ModelConfig` out."""
