"""The Python API: what `import tfexport` offers."""
