"""A case of an op, its implementations and its plan, the decision that explains it, and `explain`, which shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accelerant.config import Settings, choice_overrides, settings
from accelerant.errors import BackendUnavailable, ConfigError, DivergenceError
from accelerant.runtime import registry
from accelerant.runtime.files import clipped
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


_MOST_NODES = 64  # nodes of torch's autograd in one call; there are more only where an input's own node was not found


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
            device = registry.find_device()
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
    """Return an implementation that raises DivergenceError for a NaN, and an infinity of finite inputs; calls wait.

    An infinity in later results is none (log-sum-exp of a row that sees nothing). Captured graphs are not checked.
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


class Case(NamedTuple):
    """Everything that a choice may depend on: device and dtype of the main input, the sizes, and other options."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join(_word(part) for part in (self.shape, self.dtype, *self.options) if part != "")


def _word(part: Any) -> str:
    """Return a shape as 8x64, another value as text without torch's name."""
    try:
        if isinstance(part, tuple) and all(type(size) is int for size in part):
            return "x".join(map(str, part)) or "scalar"
        return str(part).removeprefix("torch.")
    except ValueError:  # an integer of more digits than Python prints
        return clipped(part)


case_of: Callable[[tuple[torch.device, torch.dtype, tuple[int, ...], tuple[Any, ...]]], Case]
case_of = partial(tuple.__new__, Case)
"""Build a Case from a tuple of its four fields, in a quarter of the time of the class's own constructor."""


class Cost(NamedTuple):
    """The least work of a call: bytes with each input read once and each output written once; operations."""

    bytes: int
    flops: int


FEW_ELEMENTS = "few elements"
"""An option of cases on a GPU that differentiable implementations alone serve: the call waits for the host anyway."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op.

    Attributes:
        name: "triton", "torch", "cublaslt", ...
        run: called with the arguments that follow the Case in a call of the Operation.
        refuses: returns why it cannot serve a case, or None; None if it serves every case.
        own: a kernel of Accelerant, not of a library.
        deterministic: the same inputs give the same bits; False where atomics add.
        mutates: changes its arguments: it is never raced, and is followed by another implementation after a failure
            only if it is our own and had launched no kernel.
        differentiable: consists of torch's differentiable functions, so that torch's autograd may serve the op.
        group: implementations of an op and of its backward op that read each other's saved tensors ("cudnn"); "" for
            those that share the op's own form. See saved_by.
        bind: the arguments -> a function that does the same as `run` for tensors in other memory; see Operation.bound.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Case], str | None] | None = None
    own: bool = False
    deterministic: bool = True
    mutates: bool = False
    differentiable: bool = False
    group: str = ""
    bind: Callable[..., Callable[..., Any] | None] | None = None


_SAVED_BY = "saved by "


def saved_by(group: str) -> str:
    """Return the option of a backward case that names the group whose tensors were saved; "" for the op's own form."""
    return f"{_SAVED_BY}{group}" if group else ""


def group_of(case: Case) -> str:
    """Return the group whose saved tensors a backward case has; see saved_by."""
    for option in case.options:
        if isinstance(option, str) and option.startswith(_SAVED_BY):
            return option.removeprefix(_SAVED_BY)
    return ""


# The public function is a Python wrapper, which would show in the time of a call.
torch_wants_determinism: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


class Rules(NamedTuple):
    """The settings that a choice depends on besides its case; `race` None is "auto", `forced` has pairs."""

    race: bool | None
    tune: bool
    deterministic: bool
    debug: bool
    forced: tuple[tuple[str, str], ...]
    cache_dir: Path


_latest: tuple[Settings, bool, Rules] | None = None


def rules() -> Rules:
    """Return the rules in force."""
    global _latest
    current, by_torch, latest = settings(), torch_wants_determinism(), _latest
    if latest is not None and latest[0] is current and latest[1] is by_torch:
        return latest[2]
    result = Rules(
        race=None if current.race == "auto" else current.race == "first_use",
        tune=current.tune == "first_use",
        deterministic=current.deterministic or by_torch,
        debug=current.debug,
        forced=current.implementation,
        cache_dir=current.cache_dir,
    )
    _latest = (current, by_torch, result)
    return result


V = TypeVar("V")

_RULES_LIMIT = 64  # maximum number of rules that plans are kept for
PLANS_LIMIT = 4096  # maximum number of plans under one set of rules


class PlanCache(Generic[V]):
    """Plans by case and set of rules; hot paths read `usual`, those under the settings as loaded, without overrides."""

    def __init__(self) -> None:
        self.usual: dict[Any, V] = {}
        self._others: dict[Rules, dict[Any, V]] = {}
        self._dependents: list[dict[Any, Any]] = []

    def current(self) -> dict[Any, V]:
        """Return the plans under the rules in force."""
        if not choice_overrides and not torch_wants_determinism():
            return self.usual
        key = rules()
        if (plans := self._others.get(key)) is None:
            if len(self._others) >= _RULES_LIMIT:
                self._others.clear()
            plans = self._others.setdefault(key, {})
        return plans

    def store(self, plans: dict[Any, V], key: Hashable, plan: V) -> None:
        """Keep a plan in one of the dicts, which is emptied when it is full."""
        if len(plans) >= PLANS_LIMIT:
            plans.clear()
        plans[key] = plan

    def add_dependent(self, derived: dict[Any, Any]) -> None:
        """Clear a dict that was derived from the usual plans whenever plans are dropped."""
        if all(derived is not known for known in self._dependents):
            self._dependents.append(derived)

    def forget(self, key: Hashable | None = None) -> None:
        """Drop the plans of a key, or all plans; and everything derived from the usual ones."""
        for derived in self._dependents:
            derived.clear()
        for plans in (self.usual, *list(self._others.values())):
            if key is None:
                plans.clear()
            else:
                plans.pop(key, None)
