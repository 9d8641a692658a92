"""The runtime `ort-cpu`: ONNX Runtime on the CPU, with graphs bound to NumPy arrays."""
