"""Process-wide settings of a run: determinism, precision, threads, signals, states of random generators."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import FormatError
from accelerant.runtime.host import usable_cores


@contextmanager
def numerics(*, deterministic: bool, cpu_threads: int | None = None) -> Iterator[None]:
    """Set torch's threads, TF32 and deterministic algorithms for a run, and restore them after it.

    Determinism on a GPU also needs CUBLAS_WORKSPACE_CONFIG in the environment before CUDA starts. It excludes the
    attention of cuDNN and the "memory efficient" kernels, whose backward passes are not deterministic. `cpu_threads` is
    bounded by the usable cores; None keeps torch's number, which follows OMP_NUM_THREADS.
    """
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # set by torch itself
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    efficient_attention = torch.backends.cuda.mem_efficient_sdp_enabled()
    try:
        torch.set_num_threads(min(usable_cores(), cpu_threads or threads))
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
    """Records the first SIGINT, SIGTERM or SIGHUP, so that the run stops after its step; a later SIGINT interrupts it.

    Others do not, nor a SIGINT within a second: a supervisor signals all processes, and the launcher passes it on.
    A context manager. Its number is `signal`, None before, and outside the main thread, where Python has no handlers.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # the result of signal.signal

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._at + 1.0:
            raise KeyboardInterrupt


# --- random generators -----------------------------------------------------------------------------------------------
def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of the generators of torch (CPU, and the GPU in use), NumPy and Python: tensors and JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    rest: dict[str, Any] = {"python": [version, gauss]}
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    if kind == "MT19937":  # a program may have installed another one, which is not saved
        tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
        rest["numpy"] = [int(position), int(has_gauss), float(cached)]
    return tensors, rest


def restore_random(
    tensors: Mapping[str, Tensor], rest: Mapping[str, Any], device: torch.device, *, trial: bool = False
) -> None:
    """Restore the result of `random_state`, as far as it is present; a `trial` sets generators of its own alone."""
    if "cpu" in tensors:
        (torch.Generator().set_state if trial else torch.set_rng_state)(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        on_device: Any = (
            torch.Generator(device).set_state if trial else partial(torch.cuda.set_rng_state, device=device)
        )
        on_device(tensors["cuda"])
    if "python" in tensors and "python" in rest:
        version, gauss = rest["python"]
        of_python: Any = random.Random() if trial else random
        of_python.setstate((version, tuple(tensors["python"].tolist()), gauss))
    if "numpy" in tensors and "numpy" in rest:
        (position, has_gauss, cached), words = rest["numpy"], tensors["numpy"]
        # NumPy does not check the position, from which it would read beyond its 624 words
        if words.shape != (624,) or not (0 <= position <= 624 and 0 <= words.min() <= words.max() < 1 << 32):
            raise ValueError(f"a position of {position}, {tuple(words.shape)} words")
        of_numpy: Any = np.random.RandomState() if trial else np.random
        of_numpy.set_state(("MT19937", words.numpy().astype(np.uint32), int(position), int(has_gauss), float(cached)))


def require_random(path: Path, tensors: Mapping[str, Tensor], rest: Mapping[str, Any], device: torch.device) -> None:
    """Raise FormatError unless `restore_random` accepts the states in a checkpoint; nothing is restored."""
    try:
        restore_random(tensors, rest, device, trial=True)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"checkpoint {path} has the state of no random generator: {reason}") from None


@contextmanager
def forked_random(seed: int | None = None) -> Iterator[None]:
    """Restore the CPU's generators (torch, NumPy, Python) after the block, for which `seed`, if any, seeds them."""
    host = torch.device("cpu")
    before = random_state(host)
    if seed is not None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        restore_random(*before, host)
