"""One module a suite."""
