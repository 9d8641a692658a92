"""Checks that a bundle is right: parity with PyTorch, certificates, and checks of a checkpoint."""
