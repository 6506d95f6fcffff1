import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from accelerant.errors import ConfigError
from accelerant.nn.train.data import (
    even_starts,
    gather,
    halves,
    permutation,
    prefetched,
    random_windows,
    require_windows,
)

TOKENS = np.arange(100, dtype=np.uint16)


def even_windows(tokens, *, count, context):
    return gather(tokens, even_starts(tokens, count=count, context=context), context)


def test_windows_are_runs_of_the_text():
    rows = random_windows(TOKENS, seed=1, step=0, count=500, context=4)
    assert rows.shape == (500, 5)
    assert (np.diff(rows, axis=1) == 1).all()
    assert (rows.min(), rows.max()) == (0, 99)  # the first and the last window are drawn too


def test_a_step_depends_on_seed_and_step_only():
    draw = {
        (seed, step): random_windows(TOKENS, seed=seed, step=step, count=8, context=4)
        for seed in (0, 1)
        for step in (0, 1, 2)
    }
    assert np.array_equal(draw[1, 2], random_windows(TOKENS, seed=1, step=2, count=8, context=4))
    different = {array.tobytes() for array in draw.values()}
    assert len(different) == 6


def test_neighbouring_steps_share_no_draws():
    wide = np.arange(60_000, dtype=np.uint16)
    starts = [set(random_windows(wide, seed=0, step=step, count=32, context=1)[:, 0]) for step in (4, 5)]
    assert len(starts[0] & starts[1]) <= 2


def test_the_stream_is_the_one_that_old_checkpoints_used():
    # Philox4x64-10 by numpy 2.4; resuming an old run needs the same draws for ever.
    assert random_windows(TOKENS, seed=7, step=3, count=6, context=4)[:, 0].tolist() == [73, 26, 5, 24, 75, 90]


def test_even_windows_cover_without_overlap():
    rows = even_windows(TOKENS, count=99, context=9)
    assert len(rows) == 11
    assert rows[:, 0].tolist() == list(range(0, 99, 9))
    assert even_windows(TOKENS, count=3, context=9)[:, 0].tolist() == [0, 45, 90]


def test_the_smallest_text_has_one_window():
    assert even_windows(TOKENS[:10], count=5, context=9).tolist() == [list(range(10))]
    assert random_windows(TOKENS[:10], seed=0, step=0, count=2, context=9).tolist() == [list(range(10))] * 2


def test_too_little_text_is_refused():
    require_windows(TOKENS[:10], 9, "training")
    with pytest.raises(ConfigError, match="the training part has 9 tokens, one window needs 10"):
        require_windows(TOKENS[:9], 9, "training")


def windows(tokens, steps):
    return closing(
        prefetched(lambda step: halves(random_windows(tokens, seed=5, step=step, count=3, context=4)), steps, pin=False)
    )


def test_prefetched_batches_are_the_steps_own():
    with windows(TOKENS, range(6, 20)) as batches:
        for step, [rows] in zip(range(6, 20), batches, strict=True):
            expected = torch.from_numpy(random_windows(TOKENS, seed=5, step=step, count=3, context=4))
            assert torch.equal(rows[0], expected[:, :-1])
            assert torch.equal(rows[1], expected[:, 1:])


def test_the_reader_pins_and_not_the_thread(monkeypatch):
    """What another thread asks of CUDA breaks the capture of a graph."""
    threads = []

    def pin(tensor):
        threads.append(threading.current_thread())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    assert len(list(prefetched(lambda step: (torch.ones(1), torch.ones(1)), range(3), pin=True))) == 3
    assert threads == [threading.main_thread()] * 6


def test_leaving_early_ends_the_thread():
    with windows(TOKENS, range(10**6)) as batches:
        next(batches)
        (thread,) = [thread for thread in threading.enumerate() if "accelerant-batches" in thread.name]
    assert not thread.is_alive()


def test_an_error_in_the_thread_reaches_the_reader():
    with windows(TOKENS[:3], range(4)) as batches, pytest.raises(OverflowError):
        list(batches)


def test_an_epochs_order_has_every_row_once_and_depends_on_seed_and_epoch():
    orders = [permutation(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 4
    assert np.array_equal(orders[0], permutation(0, 0, 50))
    assert permutation(7, 3, 6).tolist() == [2, 0, 3, 5, 4, 1]  # what checkpoints stand on, for ever
