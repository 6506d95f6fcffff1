"""Jobs of the service: the store, the queue, the worker processes, and JobService, which puts them together."""
