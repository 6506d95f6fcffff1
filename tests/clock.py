"""A clock for tests of what is timed: it stands still but for what sleeps by it, however busy the machine is."""

import time


class Clock:
    """Stands in for the module `time` of another module."""

    def __init__(self):
        self.now_s = 1000.0

    def sleep(self, seconds):
        self.now_s += seconds

    def perf_counter(self):
        self.now_s += 1e-7  # no span is of no length
        return self.now_s

    monotonic = perf_counter

    def __getattr__(self, name):
        return getattr(time, name)
