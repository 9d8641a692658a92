"""Export trained PyTorch encoder-decoder Transformers to ONNX, and decode them token for token as PyTorch would."""

from importlib.metadata import version

__version__ = version("tfexport")
