"""One module a suite; each has `run(device, ...) -> BenchmarkRecord`."""
