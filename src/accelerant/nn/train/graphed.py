"""Code shared by steps that become CUDA graphs after some eager ones (step.py, privacy/dp/training/step.py)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from accelerant.config import settings
from accelerant.errors import ConfigError, FallbackWarning, LaunchError
from accelerant.nn._precision import LowWeights
from accelerant.nn.optim import MultiTensorOptimizer
from accelerant.runtime.ledger import FallbackRecord, ledger

__all__ = ["EAGER_STEPS", "GraphedStep", "Same"]

T = TypeVar("T")

EAGER_STEPS = 3
"""Steps before the capture: compiling and tables in the first, addresses that come back in the others."""


class Same:
    """Objects that are compared by identity, and kept: the id() of one that is gone may be another's.

    Args:
        objects: the states of an optimiser, which `load_state_dict` replaces.
    """

    __slots__ = ("_objects",)

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = tuple(objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        ours, theirs = self._objects, other._objects
        return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._objects)))


class GraphedStep:
    """The base of a step: where it computes, in what precision, at which rate, and whether as a graph.

    Args:
        op: the step's name in the ledger of ops.
        words: what it is called in messages.
        model: named in them.
        optimizer: whose groups take the rate.
        device: of the parameters.
        precision: for autocast; None for none.
        low: casts each matrix once a pass; None for none.
    """

    def __init__(
        self,
        op: str,
        words: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        precision: torch.dtype | None,
        low: LowWeights | None,
    ) -> None:
        self._op, self._words = op, words
        self._case = f"{type(model).__name__} on {device}"
        self._groups = optimizer
        self._device = device
        self._precision = precision
        self._low = low
        self._rate: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._wants_graph = False

    # --- eager, and captured as well ---------------------------------------------------------------------------------

    def _precision_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._low is None else self._low.refreshed()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._precision is None else torch.autocast(self._device.type, dtype=self._precision)

    def _moved(self, batch: Iterable[Tensor]) -> list[Tensor]:
        return [each.to(self._device, non_blocking=True) for each in batch]

    def _set_rate(self, rate: float) -> None:
        """A number for eager steps, memory for those that are replayed; of float32 both, so that they give the same."""
        if not self._wants_graph:
            self._put_rate(rate)
            return
        if self._rate is None:
            self._rate = torch.zeros((), dtype=torch.float32, device=self._device)
        self._rate.fill_(rate)
        for group in self._groups.param_groups:
            group["lr"] = self._rate

    def _put_rate(self, rate: float) -> None:
        rate = torch.tensor(rate, dtype=torch.float32).item()
        for group in self._groups.param_groups:
            group["lr"] = rate

    def _aside(self, run: Callable[[], T]) -> T:
        """Run on a stream of its own, as what comes before a capture must."""
        if not self._wants_graph:
            return run()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = run()
        current.wait_stream(self._stream)
        return found

    # --- the graph ---------------------------------------------------------------------------------------------------

    def _decide(self, graph: bool | None, obstacle: str | None) -> None:
        """Settle whether steps are to be captured.

        Args:
            graph: as the user has it; None: where it can be.
            obstacle: why it cannot be.

        Raises:
            LaunchError: it was asked for, cannot be, and the fallback policy forbids another way.
        """
        self._wants_graph = graph is not False and obstacle is None
        if graph and obstacle is not None:
            self._refuse(obstacle)

    def _obstacle(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why no step can be captured, as far as device and optimiser tell."""
        if self._device.type != "cuda" or torch.version.hip is not None:
            return f"parameters are on {self._device}: graphs are CUDA's"
        if not isinstance(optimizer, MultiTensorOptimizer) and not optimizer.defaults.get("capturable"):
            return f"{type(optimizer).__name__} was not made with capturable=True"
        return None

    def _recorded(self, capture: Callable[[], object], undo: Callable[[], object] | None = None) -> bool:
        """Capture, and say whether that went well; where it did not, steps run eagerly from now on, and that is said.

        Args:
            capture: records, and keeps what it gives.
            undo: called where it failed.
        """
        try:
            capture()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ConfigError, LaunchError) as error:  # torch's errors of a capture are RuntimeErrors
            if undo is not None:
                undo()
            self._refuse(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return False
        return True

    def _refuse(self, reason: str) -> None:
        """Say in the ledger, and once in words, that steps run eagerly; or raise, as the fallback policy has it."""
        self._wants_graph = False
        if settings().fallback == "forbid":
            raise LaunchError(f"the {self._words} step cannot be a CUDA graph: {reason}")
        entry = FallbackRecord(self._op, self._case, "graph", "eager", reason)
        if ledger().fallback(entry) or settings().fallback == "warn":
            warnings.warn(
                f"{self._op} ({self._case}): no CUDA graph, steps run eagerly. {reason}", FallbackWarning, stacklevel=5
            )
