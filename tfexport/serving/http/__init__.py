"""HTTP itself: bodies, forms, connections, responses and the OpenAPI description."""
