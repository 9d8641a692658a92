"""The Open Inference Protocol, version 2, which clients of Triton and KServe speak."""
