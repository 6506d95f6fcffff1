"""Choice among implementations, with reasons.

An op module declares its implementations in order of preference and calls its Operation with a Case (everything a
choice may depend on) and the arguments. The first call of a case chooses a plan; later calls look it up:

    layer_norm_fwd = Operation("layer_norm_fwd", (
        Implementation("triton", _run_triton, refuses=_triton_refuses, own=True),
        Implementation("torch", _run_torch),
    ), cost=_cost)
    ...
    y, mean, rstd = layer_norm_fwd(Case(x.device, x.dtype, (M, N)), x, weight, bias, eps)

An implementation that fails before it wrote anything (compile, refused launch, allocation) is followed by the next
ones from the same inputs, as the fallback policy allows: ops are functional, so nothing can be half-written. One that
did not compile or launch stays out for that case; each later call is counted, warned of or refused as the policy says.
One that lacked memory is tried again at the next call. Where nothing is left, an out-of-memory error names the op, the
bytes and the largest holders; an error after which the process has lost its device is raised as DeviceLost and never
worked around. What ran, what refused and what fell back goes into the ledger.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accelerant.config import settings
from accelerant.errors import CompileError, FallbackWarning, LaunchError, OutOfMemory, UnsupportedCase
from accelerant.runtime.ledger import FallbackRecord, OpRecord, ledger
from accelerant.runtime.provider import ComputeProvider

__all__ = [
    "Case",
    "Cost",
    "Decision",
    "Explanation",
    "Implementation",
    "Operation",
    "explain",
    "explain_quietly",
    "operations",
]

RECOVERABLE = (CompileError, LaunchError, OutOfMemory, UnsupportedCase, torch.OutOfMemoryError)
"""Failures seen before anything was written."""

_TRANSIENT = (OutOfMemory, torch.OutOfMemoryError)
_PLANS_LIMIT = 4096
"""The most cases whose plans, and whose broken implementations, an Operation keeps."""


class Case(NamedTuple):
    """What a choice may depend on; hashable and cheap.

    Attributes:
        device: where the inputs are.
        dtype: of the main input.
        shape: the sizes that matter to the op, for example (M, N).
        options: what else matters, for example ("tanh",) or strides.
    """

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: tuple[Any, ...] = ()

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)) or "scalar", str(self.dtype).removeprefix("torch.")]
        return " ".join(parts + [str(option) for option in self.options])


class Cost(NamedTuple):
    """The least work of a call: bytes with each input read once and each output written once; operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op.

    Attributes:
        name: "triton", "torch", "cublaslt", ...
        run: takes what the Operation is called with after the Case.
        refuses: the reason why it cannot serve a case, or None; None altogether if it serves all.
        own: Accelerant's own kernel, not a library's.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Case], str | None] | None = None
    own: bool = False


@dataclass(slots=True)
class _Plan:
    """A case's choice; `fallback_from` are the preferred implementations that failed, with their errors."""

    implementation: Implementation
    record: OpRecord
    provider: ComputeProvider
    device: int
    refused: tuple[tuple[str, str], ...]
    fallback_from: tuple[tuple[str, Exception], ...] = ()


_operations: dict[str, Operation] = {}


def operations() -> dict[str, Operation]:
    """Every Operation that was declared so far, by name."""
    return dict(_operations)


class Operation:
    """An op's implementations, its plans by case and its cost; see the module's docstring.

    Args:
        name: of the op in the ledger.
        implementations: the preferred first.
        cost: least bytes and operations of a case.
    """

    def __init__(self, name: str, implementations: Sequence[Implementation], *, cost: Callable[[Case], Cost]) -> None:
        self.name = name
        self.implementations = tuple(implementations)
        self._cost = cost
        self._plans: dict[Case, _Plan] = {}
        self._broken: dict[Case, dict[str, Exception]] = {}
        _operations[name] = self

    def __call__(self, case: Case, *args: Any) -> Any:
        """Run the case's implementation; count it, and time it now and then."""
        plan = self._plans.get(case)
        if plan is None:
            plan = self._choose(case)
        if plan.fallback_from:
            self._keep_policy(case, plan)
        start = _ledger.begin(plan.record, plan.provider, plan.device)
        try:
            result = plan.implementation.run(*args)
        except RECOVERABLE as error:
            _ledger.failed(plan.record)
            return self._fall_back(case, plan, error, args)
        except RuntimeError as error:
            _ledger.failed(plan.record)
            lost = plan.provider.lost(error)
            if lost is None:
                raise
            raise lost from error
        if start is not None:
            _ledger.end(plan.record, start, plan.provider, plan.device)
        if _observers:
            _notify(self.name, case, plan)
        return result

    def forget(self) -> None:
        """Choose anew from the next call on; for tests and after a change of settings."""
        self._plans.clear()
        self._broken.clear()

    def run(self, implementation: str, *args: Any) -> Any:
        """Run one implementation by name, past choice and ledger; for tests and benchmarks.

        Raises:
            UnsupportedCase: there is none of that name.
        """
        for candidate in self.implementations:
            if candidate.name == implementation:
                return candidate.run(*args)
        known = ", ".join(candidate.name for candidate in self.implementations)
        raise UnsupportedCase(f"{self.name} has the implementations {known}; got {implementation!r}")

    def refusals(self, case: Case) -> list[tuple[Implementation, str | None]]:
        """Each implementation with its reason against the case, None where it serves it."""
        broken = self._broken.get(case, {})
        return [
            (each, _reason(broken[each.name]) if each.name in broken else each.refuses(case) if each.refuses else None)
            for each in self.implementations
        ]

    def _choose(self, case: Case) -> _Plan:
        refused: list[tuple[str, str]] = []
        for implementation, reason in self.refusals(case):
            if reason is None:
                break
            refused.append((implementation.name, reason))
        else:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
            raise UnsupportedCase(f"{self.name} has no implementation for {case} on {case.device} ({reasons})")
        plan = self._plan(case, implementation, tuple(refused))
        broken = self._broken.get(case, {})
        plan.fallback_from = tuple((name, broken[name]) for name, _ in refused if name in broken)
        if len(self._plans) >= _PLANS_LIMIT:
            self._plans.clear()
        self._plans[case] = plan
        return plan

    def _plan(self, case: Case, implementation: Implementation, refused: tuple[tuple[str, str], ...]) -> _Plan:
        from accelerant.runtime import registry

        provider = registry.provider_of(case.device)
        cost = self._cost(case)
        record = OpRecord(
            op=self.name,
            implementation=implementation.name,
            backend=provider.name,
            device=str(case.device),
            case=str(case),
            own=implementation.own,
            refused=refused,
            bytes_per_call=cost.bytes,
            flops_per_call=cost.flops,
        )
        return _Plan(implementation, _ledger.record(record), provider, case.device.index or 0, refused)

    def _keep_policy(self, case: Case, plan: _Plan) -> None:
        """Before a call whose preferred implementation is broken: raise why, or count and warn."""
        if settings().fallback == "forbid":
            raise self._in_words(copy.copy(plan.fallback_from[0][1]), case)  # a copy: tracebacks would pile up
        for name, error in plan.fallback_from:
            _announce(self._fallback(case, name, plan.implementation.name, error))

    def _fall_back(self, case: Case, plan: _Plan, error: Exception, args: tuple[Any, ...]) -> Any:
        """Run the remaining implementations in turn from the same inputs, or raise what the last one raised."""
        if settings().fallback == "forbid":
            raise self._in_words(error, case)
        failed = {plan.implementation.name: error}
        for following, reason in self.refusals(case):
            if reason is not None or following.name in failed:
                continue
            traceback.clear_frames(error.__traceback__)  # its frames hold memory that may be what is lacking
            refused = [*plan.refused, *((name, _reason(each)) for name, each in failed.items())]
            now = self._plan(case, following, tuple(refused))
            start = _ledger.begin(now.record, now.provider, now.device)
            try:
                result = following.run(*args)
            except RECOVERABLE as another:
                _ledger.failed(now.record)
                failed[following.name] = error = another
                continue
            except RuntimeError as another:
                _ledger.failed(now.record)
                lost = now.provider.lost(another)
                if lost is None:
                    raise
                raise lost from another
            if start is not None:
                _ledger.end(now.record, start, now.provider, now.device)
            self._remember(case, failed)
            for name, each in failed.items():
                _announce(self._fallback(case, name, following.name, each))
            if _observers:
                _notify(self.name, case, now)
            return result
        raise self._in_words(error, case)

    def _remember(self, case: Case, failed: dict[str, Exception]) -> None:
        """Leave out, from the next call of the case on, what failed for another reason than a lack of memory."""
        lasting = {name: copy.copy(error) for name, error in failed.items() if not isinstance(error, _TRANSIENT)}
        if lasting:
            if len(self._broken) >= _PLANS_LIMIT:
                self._broken.clear()
            self._broken[case] = self._broken.get(case, {}) | lasting
            self._plans.pop(case, None)

    def _fallback(self, case: Case, wanted: str, ran: str, error: Exception) -> FallbackRecord:
        return FallbackRecord(self.name, f"{case} on {case.device}", wanted, ran, _reason(error))

    def _in_words(self, error: Exception, case: Case) -> Exception:
        """What an operator needs to know of an error that nothing was left to do about."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        from accelerant.runtime.memory import describe_out_of_memory

        described = OutOfMemory(describe_out_of_memory(self.name, error, case.device))
        described.__cause__ = error
        return described


_ledger = ledger()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines()[:2])}"


def _announce(entry: FallbackRecord) -> None:
    first = _ledger.fallback(entry)
    if first or settings().fallback == "warn":
        warnings.warn(
            f"{entry.op} ({entry.case}): {entry.wanted} failed, {entry.ran} ran instead. {entry.reason}",
            FallbackWarning,
            stacklevel=4,
        )


# --- explain -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """One dispatch inside an explained call.

    Attributes:
        op, case, device: what ran on what.
        implementation: what was chosen.
        own: Accelerant's own kernel.
        refused: what was preferred but refused, with the reason.
        not_tried: implementations after the chosen one.
    """

    op: str
    case: str
    device: str
    implementation: str
    own: bool
    refused: tuple[tuple[str, str], ...]
    not_tried: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.op}  {self.case}  on {self.device}"]
        lines += [f"  refused  {name}: {reason}" for name, reason in self.refused]
        lines.append(f"  chosen   {self.implementation}{' (own kernel)' if self.own else ' (library)'}")
        lines += [f"  not tried  {name}" for name in self.not_tried]
        return "\n".join(lines)


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


_observers: list[Callable[[Decision], None]] = []
_observers_lock = threading.Lock()


def _notify(op: str, case: Case, plan: _Plan) -> None:
    names = [each.name for each in _operations[op].implementations]
    tried = {name for name, _ in plan.refused} | {plan.implementation.name}
    decision = Decision(
        op=op,
        case=str(case),
        device=str(case.device),
        implementation=plan.implementation.name,
        own=plan.implementation.own,
        refused=plan.refused,
        not_tried=tuple(name for name in names if name not in tried),
    )
    for observer in list(_observers):
        observer(decision)


def explain_quietly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """As explain, without printing."""
    seen: list[Decision] = []
    with _observers_lock:
        _observers.append(seen.append)
    began = time.perf_counter()
    try:
        result = fn(*args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Explanation(result, seen, (time.perf_counter() - began) * 1e3)
    finally:
        with _observers_lock:
            _observers.remove(seen.append)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn and print, for each op in it, which implementation ran and which were refused, with the reason.

    Backward passes that run inside fn count too. Other threads' calls in the meantime are seen as well.

    Returns:
        the same as an object; `.result` is what fn returned.

    >>> accelerant.explain(accelerant.ops.gelu, x)
    gelu_fwd  8192x4096 bfloat16 none  on cuda:0
      chosen   triton (own kernel)
      not tried  torch
    0.071 ms in all
    """
    explanation = explain_quietly(fn, *args, **kwargs)
    print(explanation)
    return explanation
