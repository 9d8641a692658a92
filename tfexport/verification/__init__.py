"""Is a bundle right? Parity with PyTorch, certificates, and checks of a checkpoint."""
