"""Every value within a graph against its definition in PyTorch."""
