"""Export trained PyTorch encoder-decoder Transformers to ONNX, and decode them token for token as PyTorch would."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tfexport")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
