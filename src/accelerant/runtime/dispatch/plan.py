"""A case's plan, the decision that explains it, and `explain`, which shows decisions to people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accelerant.config import settings
from accelerant.errors import BackendUnavailable, ConfigError, DivergenceError
from accelerant.runtime import registry
from accelerant.runtime.host import fork_safe
from accelerant.runtime.html_page import table
from accelerant.runtime.ledger import Decision, OpRecord, observers
from accelerant.runtime.provider import ComputeProvider

__all__ = [
    "Decision", "DispatchEntry", "Explanation", "explain", "explain_quietly", "observe_backward", "observers",
]  # fmt: skip


@dataclass(slots=True)
class DispatchEntry:
    """The plan of an Operation for one case, with the decision that explains it.

    Attributes:
        forced: no other implementation may run.
        torch_autograd: torch alone serves the case, and its own autograd may differentiate the call.
        failed: preferred implementations that failed in an earlier call, with their errors.
    """

    decision: Decision
    run: Callable[..., Any]
    record: OpRecord
    provider: ComputeProvider
    device_index: int
    forced: bool = False
    torch_autograd: bool = False
    failed: tuple[tuple[str, Exception], ...] = ()


_MOST_NODES = 16  # nodes of torch's autograd in one call; there are more only where an input's own node was not found


def observe_backward(result: Any, args: Sequence[Any], begin: Callable[[], Callable[[float], None]]) -> None:
    """Time the backward passes through one call, which torch's autograd recorded.

    `begin` is called at the start of a pass; its result is called with the milliseconds in the call's own nodes.
    """
    tensors = result if isinstance(result, tuple) else (result,)
    outside = {x.grad_fn for x in args if isinstance(x, torch.Tensor)}
    left = [y.grad_fn for y in tensors if isinstance(y, torch.Tensor)]
    nodes: list[Any] = []
    while left:
        node = left.pop()
        if node is None or node in outside or node in nodes or hasattr(node, "variable"):  # a leaf's, which has it
            continue
        nodes.append(node)
        if len(nodes) > _MOST_NODES:
            return
        left += [following for following, _ in node.next_functions]
    waiting = count = len(nodes)
    total_ms = began = 0.0
    end: Callable[[float], None] | None = None

    def before(_gradients: Any) -> None:
        nonlocal began, end
        if waiting == count:
            end = begin()
        began = time.perf_counter()

    def after(_inputs: Any, _outputs: Any) -> None:
        nonlocal waiting, total_ms
        total_ms += (time.perf_counter() - began) * 1e3
        waiting -= 1
        if not waiting and end is not None:
            end(total_ms)
            waiting, total_ms = count, 0.0

    for node in nodes:  # no hook refers to a node, which would then never be freed
        node.register_prehook(before)
        node.register_hook(after)


@dataclass(slots=True)
class Explanation:
    """The result of a function, and the decisions within its call, one for each dispatch, in order.

    `total_ms` is the wall time of the call with the device synchronized. If `explain` has printed it, its repr is one
    line.
    """

    result: Any
    decisions: list[Decision] = field(default_factory=list)
    total_ms: float = 0.0
    printed: bool = False

    def __str__(self) -> str:
        body = [str(decision) for decision in self.decisions] or ["no op of Accelerant ran"]
        return "\n".join([*body, *self.why_not_gpu(), f"{self.total_ms:.3f} ms in all"])

    def __repr__(self) -> str:
        return f"Explanation({len(self.decisions)} decisions, {self.total_ms:.3f} ms)" if self.printed else str(self)

    def why_not_gpu(self) -> list[str]:
        """Return the lines that say why ops ran on the CPU: the reason why no GPU is there, or where their arrays are.

        Empty if none ran there, or if a setting asks for the CPU.
        """
        if all(decision.device.partition(":")[0] != "cpu" for decision in self.decisions):
            return []
        wanted = settings().backend
        lines: list[str] = []
        try:
            if (name := registry.backend_named(wanted)) == "cpu":
                return []
            if name != "auto":
                setting = f"the setting backend (ACCELERANT_BACKEND) is {wanted!r}, which moves no arrays"
                lines = [f"warning: {setting}: ops run where theirs are, here on the CPU; nothing was copied"]
            device = registry.choose()
            reason = registry.reason_without_gpu() if device.backend == "cpu" else ""
        except (BackendUnavailable, ConfigError) as error:
            return [*lines, f"no GPU: {error}"]
        if device.backend == "cpu":
            return [f"no GPU: {reason}"]
        how = f'accelerant.to(x, "{device.label}"), or an Accelerator("{device.label}"), which copies'
        return [*lines, f"not on {device.label} ({device.name}), since the arrays are on the CPU: {how}"]

    def _repr_html_(self) -> str | None:
        if self.printed:
            return None
        rows = []
        for one in self.decisions:
            refused = "; ".join(f"{name}: {reason}" for name, reason in one.refused)
            cells = (one.op, one.case, one.device, one.implementation, one.reason, refused)
            rows.append([("", cell) for cell in cells])
        decided = table(("op", "case", "device", "chosen", "because", "refused"), rows)
        reasons = "".join(f"{escape(line)}<br>" for line in self.why_not_gpu())
        return f"{decided}{reasons}{self.total_ms:.3f} ms in all"


_observers_lock = fork_safe(threading.Lock())


def explain_quietly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn as `explain` does, without printing."""
    if not callable(fn):
        raise ConfigError(f"explain takes a function, as accelerant.ops.gelu, and its arguments; got {fn!r:.80}")
    decisions: list[Decision] = []
    with _observers_lock:
        observers.append(decisions.append)
    began = time.perf_counter()
    try:
        result = fn(*args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Explanation(result, decisions, (time.perf_counter() - began) * 1e3)
    finally:
        with _observers_lock:
            observers.remove(decisions.append)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn and print, for each op in it, which implementation ran, why, and which were refused, with the reason.

    If an op ran on the CPU, a line says why: what makes the GPU absent, as `devices` has it, or that the arrays are on
    the CPU. A warning says if ACCELERANT_BACKEND names a GPU all the same, since ops run where their arrays are.

    Backward passes that run inside fn count too, and so do calls of other threads in the meantime. The result has the
    same as an object; its `.result` is what fn returned.

    >>> accelerant.explain(accelerant.ops.gelu, x)
    gelu_fwd  8192x4096 bfloat16 none  on cuda:0
      chosen   triton (own kernel): raced 0.0686 ms against torch 0.0786 ms (2026-11-21, this device)
    0.071 ms in all
    """
    explanation = explain_quietly(fn, *args, **kwargs)
    print(explanation)
    explanation.printed = True
    return explanation


# --- the setting debug -----------------------------------------------------------------------------------------------


def checked(run: Callable[..., Any], named: str, *, mutates: bool) -> Callable[..., Any]:
    """Return an implementation that raises DivergenceError for a result that is not finite; each call waits.

    A NaN is always an error. An infinity is none if an input is not finite either (-inf is the usual mask of softmax),
    nor in later results (attention's log-sum-exp of a row that sees nothing). Nothing is checked in a captured CUDA
    graph.
    """

    def run_checked(*args: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return run(*args)
        before = _flaws(args) if mutates else {}
        results = run(*args)
        new = {i: flaw for i, flaw in _flaws(args if mutates else results).items() if before.get(i) != flaw}
        if new:
            known = before if mutates else _flaws(args)
            if any(flaw.nans or (not known and (flaw.infinite_above or i == 0 or mutates)) for i, flaw in new.items()):
                flaws = "; ".join(f"result {i} {flaw}" for i, flaw in new.items())
                already = "; ".join(f"already input {i} {flaw}" for i, flaw in known.items())
                raise DivergenceError(f"{named}: {flaws}; {already or 'every input is finite'}")
        return results

    return run_checked


class _Flaw(NamedTuple):
    """The elements of a tensor that are not finite, and the index of the first."""

    shape: tuple[int, ...]
    nans: int
    infinite: int
    infinite_above: bool
    first: tuple[int, ...]

    def __str__(self) -> str:
        counts = [f"{self.nans} NaN"] * bool(self.nans) + [f"{self.infinite} infinite"] * bool(self.infinite)
        return f"of shape {self.shape} has {' and '.join(counts)}, the first at {self.first}"


def _flaws(values: Any) -> dict[int, _Flaw]:
    """Return the flaws of the tensors that are not finite, by their positions among the tensors."""
    flaws = {}
    for i, x in enumerate(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)):
        if x.is_floating_point() and x.device.type != "meta":
            wide = (x if x.element_size() > 1 else x.float()).detach()
            finite = wide.isfinite()
            if not bool(finite.all()):
                nans, bad = int(wide.isnan().sum()), (~finite).nonzero()
                flaws[i] = _Flaw(
                    tuple(x.shape), nans, len(bad) - nans, bool((wide == torch.inf).any()), tuple(bad[0].tolist())
                )
    return flaws
