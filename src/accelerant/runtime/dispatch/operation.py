"""Choice among implementations, with reasons.

An op module declares its implementations in order of preference and calls its Operation with a Case (everything a
choice may depend on) and the arguments. The first call of a case chooses a plan; later calls look it up:

    layer_norm_fwd = Operation("layer_norm_fwd", (
        Implementation("triton", _run_triton, refuses=_triton_refuses, own=True),
        Implementation("torch", _run_torch),
    ), cost=_cost)
    ...
    y, mean, rstd = layer_norm_fwd(Case(x.device, x.dtype, (M, N)), x, weight, bias, eps)

Which of those that serve a case runs is choose.py's: the forced one, the fastest of a race, or the first.

An implementation that fails before it wrote anything (compile, refused launch, allocation) is followed by the next
ones from the same inputs, as the fallback policy allows: ops are functional, so nothing can be half-written. One that
did not compile or launch stays out for that case; each later call is counted, warned of or refused as the policy says.
One that lacked memory is tried again at the next call. One that changes its arguments is followed by another only if
it is our own and had launched nothing yet. Where nothing is left, an out-of-memory error names the op, the bytes and
the largest holders; an error after which the process has lost its device is raised as DeviceLost and never worked
around. What ran, what refused and what fell back goes into the ledger.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accelerant.config import choice_overrides, override, settings
from accelerant.errors import (
    AccelerantError,
    CompileError,
    ConfigError,
    FallbackWarning,
    LaunchError,
    OutOfMemory,
    UnsupportedCase,
)
from accelerant.runtime import registry
from accelerant.runtime.dispatch.case import Case, Cost, Implementation, case_of, group_of, saved_by
from accelerant.runtime.dispatch.choose import Choice, choose, powers_of_two, reason_of
from accelerant.runtime.dispatch.decisions import Decision, Explanation, explain, explain_quietly, observers
from accelerant.runtime.dispatch.rules import Plans, rules, torch_wants_determinism
from accelerant.runtime.launches import launches
from accelerant.runtime.ledger import FallbackRecord, OpRecord, ledger
from accelerant.runtime.memory.live_set import count, has_fakes, predictions, uncounted
from accelerant.runtime.provider import ComputeProvider

__all__ = [
    "Case",
    "Cost",
    "Decision",
    "Explanation",
    "Implementation",
    "Operation",
    "case_of",
    "explain",
    "explain_quietly",
    "force",
    "operations",
    "saved_by",
    "taken_by_torch",
]

RECOVERABLE = (CompileError, LaunchError, OutOfMemory, UnsupportedCase, torch.OutOfMemoryError)
"""Failures seen before anything was written."""

_TRANSIENT = (OutOfMemory, torch.OutOfMemoryError)
_PLANS_LIMIT = 4096
"""The most cases whose plans, and whose broken implementations, an Operation keeps."""


@dataclass(slots=True)
class _Plan:
    """A case's choice.

    `run` is the implementation's, `fallback_from` holds the preferred that failed, with errors; `by_torch` says that
    autograd may listen to the call, since torch's own backward pass is the one to take.
    """

    run: Callable[..., Any]
    implementation: Implementation
    record: OpRecord
    provider: ComputeProvider
    device: int
    refused: tuple[tuple[str, str], ...]
    raced: tuple[tuple[str, float], ...] = ()
    forced: bool = False
    fallback_from: tuple[tuple[str, Exception], ...] = ()
    by_torch: bool = False


class _Taken(threading.local):
    """What the last call that `Operation.by_torch` made is counted as, in this thread."""

    record: OpRecord | None = None

    def clear(self) -> None:
        """Forget it."""
        self.record = None


taken_by_torch = _Taken()
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
        bucket: what of a case, besides device and dtype, one race stands for; by default the options, and each size
            rounded up to a power of two.
        pairs_with: the forward op whose saved tensors this one reads, where some implementations save their own form.
    """

    def __init__(
        self,
        name: str,
        implementations: Sequence[Implementation],
        *,
        cost: Callable[[Case], Cost],
        bucket: Callable[[Case], tuple[Hashable, ...]] | None = None,
        pairs_with: str | None = None,
    ) -> None:
        self.name = name
        self.implementations = tuple(implementations)
        self.pairs_with = pairs_with
        self._cost = cost
        self._bucket = bucket or powers_of_two
        self._plans: Plans[_Plan] = Plans()
        self._usual = self._plans.usual
        self._broken: dict[Case, dict[str, Exception]] = {}
        _operations[name] = self

    def __call__(self, case: Case, *args: Any) -> Any:
        """Run the case's implementation; count it, and time it now and then."""
        if predictions and has_fakes(args):
            return self._run_on_fakes(case, args)
        plans = self._plans.now() if choice_overrides or torch_wants_determinism() else self._usual
        plan = plans.get(case)
        if plan is None:
            plan = self._choose(case, plans, args)
        if plan.fallback_from:
            self._keep_policy(case, plan)
        record = plan.record
        start = _ledger.begin(record, plan.provider, plan.device)
        try:
            result = plan.run(*args)
        except RECOVERABLE as error:
            _ledger.failed(record)
            return self._fall_back(case, plan, error, args)
        except _ChangedError as stopped:
            _ledger.failed(record)
            found = self._half_done(case, plan.implementation.name, stopped.error)
            raise found from found.__cause__
        except RuntimeError as error:
            _ledger.failed(record)
            lost = plan.provider.lost(error)
            if lost is None:
                raise
            raise lost from error
        if start is not None:
            _ledger.end(record, start, plan.provider, plan.device)
        if observers:
            _notify(self, case, plan)
        return result

    def by_torch(self, case: Case, args: tuple[Any, ...]) -> Any:
        """Run a case with autograd listening, if torch is all that serves it and is to differentiate it, too.

        That is so on a CPU, for an implementation that says it is differentiable, where nothing is forced. There is
        then nothing to fall back on, and what torch raises is the caller's.

        Returns:
            as a call; NotImplemented, and nothing has run, where it is not so.
        """
        plans = self._plans.now() if choice_overrides or torch_wants_determinism() else self._usual
        plan = plans.get(case)
        if plan is None:
            if case.device.type != "cpu" or len(self.candidates(case)) != 1:
                return NotImplemented
            plan = self._choose(case, plans, ())
        if not plan.by_torch:
            return NotImplemented
        start = _ledger.begin(plan.record, plan.provider, plan.device)
        try:
            result = plan.run(*args)
        except Exception:
            _ledger.failed(plan.record)
            raise
        if start is not None:
            _ledger.end(plan.record, start, plan.provider, plan.device)
        if observers:
            _notify(self, case, plan)
        taken_by_torch.record = plan.record
        return result

    def _run_on_fakes(self, case: Case, args: tuple[Any, ...]) -> Any:
        """Run the preferred implementation that runs on tensors without memory, past plans and ledger.

        Launches are left out, so an own implementation allocates what it would on real tensors. If one reads memory,
        the next is tried; temporaries of torch's count only where torch's is what really runs.
        """
        serving = self.candidates(case)
        for each in serving[:-1]:
            with contextlib.suppress(Exception):
                return each.run(*args)
        with uncounted() if len(serving) > 1 else contextlib.nullcontext():
            result = serving[-1].run(*args)
        count(result)
        return result

    def forget(self) -> None:
        """Choose anew from the next call on; for tests and after a change of settings."""
        self._plans.forget()
        self._broken.clear()

    def also_forgets(self, made: dict[Any, Any]) -> None:
        """Clear this, too, whenever plans are dropped: it was made of those under the settings as loaded."""
        self._plans.also_forgets(made)

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

    def candidates(self, case: Case) -> list[Implementation]:
        """The implementations that serve a case, the preferred first."""
        return [each for each, reason in self.refusals(case) if reason is None]

    def refusals(self, case: Case) -> list[tuple[Implementation, str | None]]:
        """Each implementation with its reason against the case, None where it serves it."""
        broken = self._broken.get(case, {})
        deterministic = rules().deterministic
        return [(each, self._refusal(each, case, broken, deterministic)) for each in self.implementations]

    def _refusal(
        self, each: Implementation, case: Case, broken: dict[str, Exception], deterministic: bool
    ) -> str | None:
        if each.name in broken:
            return reason_of(broken[each.name])
        if each.own and (lacking := registry.reason_without_kernels(case.device)):
            return lacking
        if deterministic and not each.deterministic:
            return "not deterministic"
        if self.pairs_with:
            group = group_of(case)
            if each.group != group:
                form = f"the form of {group}" if group else "its own form"
                return f"{self.pairs_with} saved its tensors in {form}, which this one does not read"
        return each.refuses(case) if each.refuses else None

    def _choose(self, case: Case, plans: dict[Case, _Plan], args: tuple[Any, ...]) -> _Plan:
        """The plan of a case that has none under the rules in force; raced if they ask for that."""
        choice = choose(self.name, case, self.refusals(case), self._bucket, args, _is_transient)
        if choice.measured:
            self._plans.forget()  # other cases of the bucket, and those under other rules, are chosen anew
        self._remember(case, choice.failed)
        broken = self._broken.get(case, {})
        order = [each.name for each in self.implementations]
        before = order[: order.index(choice.implementation.name)]
        refusals = [(each.name, why) for each, why in self.refusals(case)]
        alone = sum(why is None for _, why in refusals) == 1  # then what comes after it has a reason, too
        against = {name: why for name, why in refusals if why and (alone or name in before or name in broken)}
        by_torch = alone and case not in self._broken and _left_to_torch(case, choice.implementation)
        if by_torch:
            choice.reason += "; torch on the CPU: its own autograd where that serves"
        plan = self._plan(case, choice, tuple((dict(choice.refused) | against).items()))
        plan.by_torch = by_torch
        if not choice.forced:
            plan.fallback_from = tuple((name, broken[name]) for name in before if name in broken)
        if choice.lasting:
            if len(plans) >= _PLANS_LIMIT:
                plans.clear()
            plans[case] = plan
        return plan

    def _plan(self, case: Case, choice: Choice, refused: tuple[tuple[str, str], ...]) -> _Plan:
        provider = registry.provider_of(case.device)
        cost = self._cost(case)
        implementation = choice.implementation
        group = implementation.group
        paired = f"; its {'forward was' if self.pairs_with else 'backward will be'} {group}'s" if group else ""
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
            reason=choice.reason + paired,
        )
        return _Plan(
            run=_watched(implementation) if implementation.mutates else implementation.run,
            implementation=implementation,
            record=_ledger.record(record),
            provider=provider,
            device=case.device.index or 0,
            refused=refused,
            raced=choice.raced,
            forced=choice.forced,
        )

    def _keep_policy(self, case: Case, plan: _Plan) -> None:
        """Before a call whose preferred implementation is broken: raise why, or count and warn."""
        if settings().fallback == "forbid":
            raise self._in_words(copy.copy(plan.fallback_from[0][1]), case)  # a copy: tracebacks would pile up
        for name, error in plan.fallback_from:
            _announce(self._fallback(case, name, plan.implementation.name, error))

    def _fall_back(self, case: Case, plan: _Plan, error: Exception, args: tuple[Any, ...]) -> Any:
        """Run the remaining implementations in turn from the same inputs, or raise what the last one raised."""
        if plan.forced or settings().fallback == "forbid":
            raise self._in_words(error, case)
        failed = {plan.implementation.name: error}
        for following, reason in self.refusals(case):
            if reason is not None or following.name in failed:
                continue
            traceback.clear_frames(error.__traceback__)  # its frames hold memory that may be what is lacking
            refused = [*plan.refused, *((name, reason_of(each)) for name, each in failed.items())]
            now = self._plan(case, Choice(following, f"{', '.join(failed)} failed"), tuple(refused))
            start = _ledger.begin(now.record, now.provider, now.device)
            try:
                result = now.run(*args)
            except RECOVERABLE as another:
                _ledger.failed(now.record)
                failed[following.name] = error = another
                continue
            except _ChangedError as stopped:
                _ledger.failed(now.record)
                found = self._half_done(case, following.name, stopped.error)
                raise found from found.__cause__
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
            if observers:
                _notify(self, case, now)
            return result
        raise self._in_words(error, case)

    def _remember(self, case: Case, failed: Mapping[str, Exception]) -> None:
        """Leave out, from the next call of the case on, what failed for another reason than a lack of memory."""
        lasting = {name: copy.copy(error) for name, error in failed.items() if not _is_transient(error)}
        if lasting:
            if len(self._broken) >= _PLANS_LIMIT:
                self._broken.clear()
            self._broken[case] = self._broken.get(case, {}) | lasting
            self._plans.forget(case)

    def _half_done(self, case: Case, name: str, error: Exception) -> Exception:
        """Of an implementation that may have changed its arguments and failed; the next call starts with another."""
        self._remember(case, {name: error})
        text = (
            f"{self.name}: {name} may have changed its arguments before it failed, so no other implementation followed"
        )
        if _is_transient(error):
            described = self._in_words(error, case)
            described.add_note(text)
            return described
        stopped = AccelerantError(f"{text}. {reason_of(error)}")
        stopped.__cause__ = error
        return stopped

    def _fallback(self, case: Case, wanted: str, ran: str, error: Exception) -> FallbackRecord:
        return FallbackRecord(self.name, f"{case} on {case.device}", wanted, ran, reason_of(error))

    def _in_words(self, error: Exception, case: Case) -> Exception:
        """What an operator needs to know of an error that nothing was left to do about."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        from accelerant.runtime.memory.limits import describe_out_of_memory

        described = OutOfMemory(describe_out_of_memory(self.name, error, case.device))
        described.__cause__ = error
        return described


_ledger = ledger()


class _ChangedError(Exception):
    """An implementation that mutates failed, and may have changed its arguments by then."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _left_to_torch(case: Case, only: Implementation) -> bool:
    """Whether torch's autograd may run the gradient of the only implementation that serves a case.

    Not where an op is forced, since that may be the backward one.
    """
    return only.differentiable and case.device.type == "cpu" and not rules().forced


def _watched(each: Implementation) -> Callable[..., Any]:
    """Its run, which tells a failure before anything was changed from one after."""

    def run(*args: Any) -> Any:
        with launches() as launched:
            try:
                return each.run(*args)
            except RECOVERABLE as error:
                if each.own and not launched:
                    raise
                raise _ChangedError(error) from error

    return run


def _is_transient(error: Exception) -> bool:
    return isinstance(error, _TRANSIENT)


def _announce(entry: FallbackRecord) -> None:
    first = _ledger.fallback(entry)
    if first or settings().fallback == "warn":
        warnings.warn(
            f"{entry.op} ({entry.case}): {entry.wanted} failed, {entry.ran} ran instead. {entry.reason}",
            FallbackWarning,
            stacklevel=4,
        )


def _notify(operation: Operation, case: Case, plan: _Plan) -> None:
    tried = {name for name, _ in (*plan.refused, *plan.raced)} | {plan.implementation.name}
    decision = Decision(
        op=operation.name,
        case=str(case),
        device=str(case.device),
        implementation=plan.implementation.name,
        own=plan.implementation.own,
        refused=plan.refused,
        not_tried=tuple(each.name for each in operation.implementations if each.name not in tried),
        reason=plan.record.reason,
        raced=plan.raced,
    )
    for observer in list(observers):
        observer(decision)


# --- forcing ---------------------------------------------------------------------------------------------------------


@contextmanager
def force(**implementations: str) -> Iterator[None]:
    """Let an implementation run, and no other, for a block of code: where it refuses or fails, that is an error.

    >>> with force(gelu_fwd="torch"):
    ...     y = accelerant.ops.gelu(x)

    Args:
        implementations: op=implementation, by their names in the ledger.

    Raises:
        ConfigError: no op, or no implementation of it, has that name.
    """
    for op, name in implementations.items():
        operation = _operations.get(op)
        if operation is None:
            raise ConfigError(f"there is no op {op!r}; there are {', '.join(sorted(_operations)) or 'none yet'}")
        if name not in {each.name for each in operation.implementations}:
            known = ", ".join(each.name for each in operation.implementations)
            raise ConfigError(f"{op} has the implementations {known}; got {name!r}")
    with override(implementation={**dict(settings().implementation), **implementations}):
        yield
