"""Telemetry for operators: logs, metrics, and the observation of each request."""
