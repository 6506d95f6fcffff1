"""The service: the library over HTTP, with durable jobs on one worker process a device."""
