"""What a run sets for its process, and puts back: determinism, precision, threads, signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from accelerant.runtime.host import usable_cores

__all__ = ["StopRequest", "numerics"]


@contextmanager
def numerics(*, deterministic: bool, cpu_threads: int = 0) -> Iterator[None]:
    """Set torch for a run and restore it after: threads, TF32, deterministic algorithms.

    Determinism on a GPU also needs CUBLAS_WORKSPACE_CONFIG in the environment before CUDA starts. The
    attentions of cuDNN and of "memory efficient" kernels are left out then, since their backward passes are not
    deterministic; flash attention's is, and the plain one serves what flash does not.

    Args:
        deterministic: same input and device, same bits.
        cpu_threads: the most threads on the CPU; 0 for one a core.
    """
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # set by torch itself
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    efficient_attention = torch.backends.cuda.mem_efficient_sdp_enabled()
    try:
        torch.set_num_threads(min(threads, usable_cores(), cpu_threads or threads))
        torch.set_float32_matmul_precision("high")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)  # with warn_only, flash attention stays non-deterministic
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient_attention)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a wish to stop; a second SIGINT interrupts at once.

    A context manager; outside the main thread, where Python allows no handlers, it only keeps `signal` None.

    Attributes:
        signal: the signal's number once it came.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
