"""What clients talk to: the HTTP server, Ray Serve and the repository of a Triton server."""
