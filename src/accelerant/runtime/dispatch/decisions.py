"""What dispatch decided, for people: explain and what it prints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerant.runtime.ledger import Decision, observers

__all__ = ["Decision", "Explanation", "explain", "explain_quietly", "observers"]


@dataclass(slots=True)
class Explanation:
    """What `explain` saw.

    Attributes:
        result: what the function returned.
        decisions: every dispatch in it, in order.
        total_ms: wall time of the call, the device synchronised; includes compiling on a first call.
    """

    result: Any
    decisions: list[Decision] = field(default_factory=list)
    total_ms: float = 0.0

    def __str__(self) -> str:
        body = [str(decision) for decision in self.decisions] or ["no op of Accelerant ran"]
        return "\n".join([*body, f"{self.total_ms:.3f} ms in all"])

    def __repr__(self) -> str:
        return f"Explanation({len(self.decisions)} decisions, {self.total_ms:.3f} ms)"


_observers_lock = threading.Lock()


def explain_quietly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """As explain, without printing."""
    seen: list[Decision] = []
    with _observers_lock:
        observers.append(seen.append)
    began = time.perf_counter()
    try:
        result = fn(*args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Explanation(result, seen, (time.perf_counter() - began) * 1e3)
    finally:
        with _observers_lock:
            observers.remove(seen.append)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn and print, for each op in it, which implementation ran, why, and which were refused, with the reason.

    Backward passes that run inside fn count too. Other threads' calls in the meantime are seen as well.

    Returns:
        the same as an object; `.result` is what fn returned.

    >>> accelerant.explain(accelerant.ops.gelu, x)
    gelu_fwd  8192x4096 bfloat16 none  on cuda:0
      chosen   triton (own kernel): raced 0.0686 ms against torch 0.0786 ms (2026-11-21, this device)
    0.071 ms in all
    """
    explanation = explain_quietly(fn, *args, **kwargs)
    print(explanation)
    return explanation
