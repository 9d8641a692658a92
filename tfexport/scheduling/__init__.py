"""Requests that come one by one, decoded together: queue, scheduler, batches and workers."""
