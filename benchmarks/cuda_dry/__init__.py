"""A dry run of `ort-cuda` without a GPU: ONNX Runtime's own CUDA provider over stand-ins of the CUDA libraries.

The stand-ins (C++ beside this file) keep device memory in host memory, leave kernels out, and count. So a run shows where
nodes are placed, and how many launches, copies, waits, allocations and recordings a search needs. It shows no numbers and no
times of a GPU. `make cuda-dry` runs all cases.
"""
