"""Servers for clients: the HTTP server, Ray Serve and the model repository of a Triton server."""
