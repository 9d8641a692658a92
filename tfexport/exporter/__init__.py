"""From a checkpoint to a bundle, its TensorRT engines and a Triton repository."""
