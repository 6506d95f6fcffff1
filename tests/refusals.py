"""What must be refused, in one line a case."""

import pytest


def assert_raises(error, match, call, /, *args, **kwargs):
    """Assert that call(*args, **kwargs) raises the error, with a text that has match, if there is one; return it."""
    __tracebackhide__ = True
    with pytest.raises(error, match=match) as caught:
        call(*args, **kwargs)
    try:
        return caught.value
    finally:
        del caught  # or the traceback, which has this frame, would live until the next collection of garbage
