"""The machine and its files: processes, the GPU, caches on disk, files that are written whole."""
