"""The machine and its files: processes, the GPU, disk caches, and atomic files."""
