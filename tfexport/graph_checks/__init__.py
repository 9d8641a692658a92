"""Compares every value within a graph with its definition in PyTorch."""
