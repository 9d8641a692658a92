"""The canonical model as ONNX graphs."""
