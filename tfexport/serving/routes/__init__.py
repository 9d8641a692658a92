"""The addresses of the HTTP server, a module for each protocol."""
