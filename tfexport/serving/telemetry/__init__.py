"""What operators see: logs, metrics, and each request from outside."""
