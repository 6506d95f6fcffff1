"""An op's implementations, the choice among them, and the fallback from one to the next.

The first call of a case makes a plan: the forced implementation, else the fastest by a local race, else by a shipped
table, else the first that serves. One that fails before it wrote anything is followed by the next, as the fallback
policy allows; one that changes its arguments only if it is our own and had launched nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import pkgutil
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from accelerant import runtime
from accelerant.config import choice_overrides, override, settings, similar
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
from accelerant.runtime.compilation import background
from accelerant.runtime.dispatch.plan import (
    FEW_ELEMENTS,
    PLANS_LIMIT,
    Case,
    Cost,
    DispatchEntry,
    Implementation,
    PlanCache,
    checked,
    group_of,
    observe_backward,
    rules,
    torch_wants_determinism,
)
from accelerant.runtime.dispatch.race import (
    MARGIN,
    RACED_DEVICES,
    CandidateTimes,
    Sources,
    choices,
    fastest,
    key_of,
    obstacle,
    race,
    reason_of,
    rounded,
)
from accelerant.runtime.host import refuse_without_values
from accelerant.runtime.ledger import RARELY, SAMPLE_EVERY, Decision, FallbackRecord, OpRecord, ledger, observers
from accelerant.runtime.memory.limits import (
    count,
    describe_out_of_memory,
    has_fakes,
    is_out_of_memory,
    predictions,
    uncounted,
)
from accelerant.runtime.provider import Launches, lacks_host_memory

_RECOVERABLE = (CompileError, LaunchError, OutOfMemory, UnsupportedCase, torch.OutOfMemoryError)


def recoverable(error: BaseException) -> bool:
    """Return whether an error is a failure that is seen before anything was written."""
    return isinstance(error, _RECOVERABLE) or lacks_host_memory(error)


RACES_S, RACE_S = 60.0, 2.0
"""Seconds of a process after which none begins the races that the setting "auto" asks for, and those after which such a
race times no further calls. Compilation counts as seconds of the process."""

_race_s = 0.0
_TABLED = frozenset({"cuda"})  # types of torch device whose models have tables
_ledger = ledger()
_operations: dict[str, Operation] = {}
_UNBOUND: tuple[Any, Any, Any] = object(), None, None  # what a bound call has before it was made


def _has_no_table(device: torch.device) -> bool:
    return device.type in _TABLED and not choices().serves(device)


def _by_torch(case: Case) -> bool:
    """Return whether torch's own autograd may differentiate a case that torch alone serves."""
    return case.device.type == "cpu" or (FEW_ELEMENTS in case.options and not rules().forced)


def operations() -> dict[str, Operation]:
    """Return every Operation that was declared so far, by name."""
    return dict(_operations)


class Operation:
    """An op's implementations, its plans by case, and its cost; see the module's docstring.

    Args:
        name: in the ledger.
        implementations: the preferred first.
        cost: least bytes and operations of a case.
        bucket: the part of a case, besides device and dtype, that one race stands for; by default each size rounded up
            to a power of two, and the options.
        pairs_with: the forward op whose saved tensors this one reads, where some implementations save their own form.
    """

    def __repr__(self) -> str:
        return f"Operation({self.name!r}: {', '.join(each.name for each in self.implementations)})"

    def __init__(
        self, name: str, implementations: Sequence[Implementation], *, cost: Callable[[Case], Cost],
        bucket: Callable[[Case], tuple[Hashable, ...]] | None = None, pairs_with: str | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.implementations = tuple(implementations)
        self.pairs_with = pairs_with
        self.plans: PlanCache[DispatchEntry] = PlanCache()
        self._usual = self.plans.usual
        self._cost = cost
        self._bucket = bucket or (lambda case: (*rounded(case.shape), *case.options))
        self._broken: dict[Case, dict[str, Exception]] = {}
        self._era: dict[str, object] = {}
        self.plans.add_dependent(self._era)
        self._sources = Sources([candidate.run for candidate in implementations])
        _operations[name] = self

    def __call__(self, case: Case, *args: Any) -> Any:
        """Run the case's implementation."""
        if predictions and has_fakes(args):
            return self._run_on_fakes(case, args)
        plans = self.plans.current() if choice_overrides or torch_wants_determinism() else self._usual
        if (plan := plans.get(case)) is None:
            plan = self._choose(case, plans, args)
        return self.execute(case, plan, args)

    def execute(self, case: Case, plan: DispatchEntry, args: tuple[Any, ...]) -> Any:
        """Run a case by its plan; count the call, and time some of them."""
        if plan.failed:
            self._apply_policy(case, plan)
        record = plan.record
        with _ledger.lock:  # Ledger.begin, inlined: a call costs as much as the count
            calls = record.calls = record.calls + 1
            if recording := plan.torch_autograd and torch.is_grad_enabled():
                record.recording += 1
        start = None
        if calls <= 4 or not calls % (RARELY if recording and calls > RARELY else SAMPLE_EVERY):
            start = _ledger.mark(record, plan.provider, plan.device_index, calls)
        try:
            result = plan.run(*args)
        except Exception as error:  # noqa: BLE001 - sorted by _recover
            record.recording -= recording
            plan, result = self._recover(case, plan, error, args)
        except BaseException:  # an interrupt
            _ledger.failed(record)
            raise
        else:
            if start is not None:
                _ledger.end(record, start, plan.provider, plan.device_index)
                if recording:
                    observe_backward(result, args, _ledger.observed(record))
        if observers:
            for observer in list(observers):
                observer(plan.decision)
        return result

    def bound(self, case: Case) -> Callable[..., Any]:
        """Return the call of a case for arguments whose tensors differ in their memory alone, which nothing checks.

        After the first call it looks up no plan, but for calls that are timed, explained or under overridden settings.
        """
        bound: tuple[object, DispatchEntry, Callable[..., Any]] | None = None
        era, lock = self._era, _ledger.lock

        def call(*args: Any) -> Any:
            nonlocal bound
            usual = not (choice_overrides or predictions or torch_wants_determinism())
            begun, plan, run = bound or _UNBOUND
            if (current := era.get("") is begun) and usual and not observers:
                record = plan.record
                with lock:
                    calls = record.calls + 1
                    if counted := calls > 4 and calls % SAMPLE_EVERY:
                        record.calls = calls
                if counted:
                    try:
                        return run(*args)
                    except Exception as error:  # noqa: BLE001 - sorted by _recover
                        return self._recover(case, plan, error, args)[1]
                    except BaseException:
                        _ledger.failed(record)
                        raise
            result = self(case, *args)
            plan = self._usual.get(case) if usual and not current and background.is_ready() else None
            if plan is not None and not plan.failed and not rules().debug:
                bind = self.named(plan.decision.implementation).bind
                bound = era.setdefault("", object()), plan, (bind and bind(*args)) or plan.run
            return result

        return call

    def _run_on_fakes(self, case: Case, args: tuple[Any, ...]) -> Any:
        """Run the preferred implementation that runs on tensors without memory, without plans, launches and ledger."""
        serving = self.candidates(case)
        for candidate in serving[:-1]:
            with contextlib.suppress(Exception):
                return candidate.run(*args)
        with uncounted() if len(serving) > 1 else contextlib.nullcontext():
            result = serving[-1].run(*args)
        count(result)
        return result

    def torch_autograd_plan(self, case: Case) -> DispatchEntry | None:
        """Return the plan of a case that torch's function alone serves and torch's autograd may differentiate."""
        plans = self.plans.current() if choice_overrides or torch_wants_determinism() else self._usual
        if (plan := plans.get(case)) is None:
            if not _by_torch(case) or len(self.candidates(case)) != 1:
                return None
            plan = self._choose(case, plans, ())
        return plan if plan.torch_autograd else None

    def forget(self) -> None:
        """Discard the choices: each case chooses again. For tests, and after a change of settings."""
        self.plans.forget()
        self._broken.clear()

    def run(self, implementation: str, *args: Any) -> Any:
        """Run one implementation by name, without choice and ledger; for tests and benchmarks."""
        return self.named(implementation, UnsupportedCase).run(*args)

    def named(self, name: str, error: type[AccelerantError] = ConfigError, where: str = "") -> Implementation:
        """Return the implementation of a name; raise an error of that type where there is none."""
        for candidate in self.implementations:
            if candidate.name == name:
                return candidate
        known = ", ".join(candidate.name for candidate in self.implementations)
        raise error(f"{where}{self.name} has the implementations {known}; got {name!r}")

    def candidates(self, case: Case) -> list[Implementation]:
        """Return the implementations that serve a case, the preferred first."""
        return [candidate for candidate, reason in self.refusals(case) if reason is None]

    def refusals(self, case: Case) -> list[tuple[Implementation, str | None]]:
        """Return each implementation with its reason against the case, None where it serves it."""
        broken = self._broken.get(case, {})
        deterministic = rules().deterministic
        return [
            (candidate, self._refusal(candidate, case, broken, deterministic)) for candidate in self.implementations
        ]

    def _refusal(
        self, implementation: Implementation, case: Case, broken: dict[str, Exception], deterministic: bool
    ) -> str | None:
        if implementation.name in broken:
            return reason_of(broken[implementation.name])
        if FEW_ELEMENTS in case.options and not implementation.differentiable:
            return "it costs the host more than torch's whole call"
        if implementation.own and (lacking := registry.reason_without_kernels(case.device)):
            return lacking
        if deterministic and not implementation.deterministic:
            return "not deterministic"
        if self.pairs_with:
            group = group_of(case)
            if implementation.group != group:
                form = f"the form of {group}" if group else "its own form"
                return f"{self.pairs_with} saved its tensors in {form}, which this one does not read"
        return implementation.refuses(case) if implementation.refuses else None

    # --- the choice --------------------------------------------------------------------------------------------------
    def _choose(self, case: Case, plans: dict[Any, DispatchEntry], args: tuple[Any, ...]) -> DispatchEntry:
        """Make the plan of a case under the rules in force, with a race on the arguments if they ask for one."""
        refusals = self.refusals(case)
        serving = [candidate for candidate, reason in refusals if reason is None]
        _require_declared(rules().forced, "setting implementation: ")
        forced = dict(rules().forced).get(self.name)
        raced: tuple[tuple[str, float], ...] = ()
        failed_before: tuple[tuple[str, str], ...] = ()
        lasting = True
        if forced is not None:
            chosen, reason = self.named(forced, where="setting implementation: "), "forced"
            against = next(why for candidate, why in refusals if candidate is chosen)
            if against is not None:
                described = f"{self.name} is forced to {forced!r}, which refuses {case} on {case.device}"
                raise UnsupportedCase(f"{described}: {against}")
        elif not serving:
            reasons = "; ".join(f"{candidate.name}: {reason}" for candidate, reason in refusals)
            raise UnsupportedCase(f"{self.name} has no implementation for {case} on {case.device} ({reasons})")
        elif len(serving) == 1:
            chosen, reason = serving[0], "the only one that serves this case"
        elif case.device.type not in RACED_DEVICES or any(candidate.mutates for candidate in serving):
            chosen, reason = serving[0], "order of preference"
        else:
            try:
                measured, lasting = self._measured(case, serving, args)
            except BaseException:  # a lost device, an interrupt: counted as the preferred one's
                plan = self._plan(case, serving[0], "the race ended in an error", ())
                _ledger.begin(plan.record, plan.provider, plan.device_index)
                _ledger.failed(plan.record)
                raise
            timed = measured is not None and any(candidate.name in measured.ms for candidate in serving)
            if not timed and _has_no_table(case.device):
                chosen, reason = self._by_nearest(case, serving)
            else:
                chosen, reason, raced, failed_before = _by_times(measured, serving, str(case))
            refusals = self.refusals(case)  # with what failed in a race just now
        broken = self._broken.get(case, {})
        order = [candidate.name for candidate in self.implementations]
        preferred = order[: order.index(chosen.name)]
        alone = sum(reason is None for _, reason in refusals) == 1
        refused = dict(failed_before) | {
            candidate.name: against
            for candidate, against in refusals
            if against and (alone or candidate.name in preferred or candidate.name in broken)
        }
        torch_autograd = (
            alone
            and chosen.differentiable
            and (_by_torch(case) or not any(each.own for each in self.implementations))
            and case not in self._broken
            and not rules().forced  # it may be the backward op that is forced
            and not rules().debug
        )
        if torch_autograd:
            where = "where the host is waited for" if FEW_ELEMENTS in case.options else "alone"
            where = "on the CPU" if case.device.type == "cpu" else where
            reason += f"; torch {where}: its own autograd where that serves"
        plan = self._plan(case, chosen, reason, tuple(refused.items()), raced)
        plan.forced, plan.torch_autograd = forced is not None, torch_autograd
        if not plan.forced:
            plan.failed = tuple((name, broken[name]) for name in preferred if name in broken)
            waits = rules().deterministic or rules().debug or rules().race or rules().tune  # which times kernels
            library = any(not candidate.own for candidate in serving)
            if background.is_started() and chosen.own and library and not waits:
                plan.run = self._without_waiting(chosen, plan.run)
        if lasting:
            self.plans.store(plans, case, plan)
        return plan

    def _measured(
        self, case: Case, serving: Sequence[Implementation], args: tuple[Any, ...]
    ) -> tuple[CandidateTimes | None, bool]:
        """Return the times to choose by, raced now if the rules ask for it, and whether the choice is to be kept."""
        global _race_s
        current = rules()
        key = key_of(self.name, case.dtype, self._bucket(case))
        known = choices().find(case.device, key, self._sources)
        covered = known is not None and not known.table and all(known.covers(candidate.name) for candidate in serving)
        by_default = current.race is None and _race_s < RACES_S and _has_no_table(case.device)
        by_default = by_default and not background.is_started()  # a race waits for the compiler
        if not (current.race or by_default) or current.deterministic or covered:
            return known, True
        if obstacle(case.device, args) is not None:
            return known, False
        runs = [(candidate.name, partial(candidate.run, *args)) for candidate in serving]
        began, most_s = time.monotonic(), RACE_S if by_default else math.inf
        outcome = race(runs, case.device, most_s=most_s, lost=registry.provider_of(case.device).lost)
        _race_s += by_default * (time.monotonic() - began)
        if outcome is None or not outcome.ms:  # another thread is racing; or all failed, and the call raises the error
            return known, False
        failed = {name: reason_of(error) for name, error in outcome.failed.items()}
        measured = CandidateTimes(outcome.ms, str(case), failed=failed, sources=self._sources())
        if lasting := not any(map(is_out_of_memory, outcome.failed.values())):
            choices().keep(case.device, key, measured)
            self.plans.forget()  # other cases of the bucket, and those under other rules, are chosen anew
        self._leave_out(case, outcome.failed)
        return measured, lasting or by_default  # else each call would race again while memory lacks

    def _by_nearest(self, case: Case, serving: Sequence[Implementation]) -> tuple[Implementation, str]:
        near = choices().nearest(key_of(self.name, case.dtype, self._bucket(case)))
        name = fastest(near.ms, [candidate.name for candidate in serving]) if near is not None else None
        winner = next((candidate for candidate in serving if candidate.name == name and candidate.own), None)
        if winner is not None and near is not None:
            return winner, f"no table serves this GPU; the fastest on {near.table} ({near.case})"
        library = next((candidate for candidate in serving if not candidate.own), serving[0])
        return library, "no table serves this GPU: libraries first"

    def _plan(
        self, case: Case, chosen: Implementation, reason: str, refused: tuple[tuple[str, str], ...],
        raced: tuple[tuple[str, float], ...] = (),
    ) -> DispatchEntry:  # fmt: skip
        provider = registry.provider_of(case.device)
        if chosen.group:
            reason += f"; its {'forward was' if self.pairs_with else 'backward will be'} {chosen.group}'s"
        tried = {name for name, _ in (*refused, *raced)} | {chosen.name}
        not_tried = tuple(candidate.name for candidate in self.implementations if candidate.name not in tried)
        decision = Decision(
            self.name, str(case), str(case.device), chosen.name, chosen.own, refused, not_tried, reason, raced
        )
        key = (self.name, chosen.name, provider.name, decision.device, decision.case)
        record = _ledger.record(OpRecord(*key, chosen.own, refused, *self._cost(case), reason=reason))
        run = _guarded(chosen) if chosen.mutates else chosen.run
        if rules().debug:
            named = f"{self.name} by {chosen.name} ({decision.case} on {decision.device})"
            run = checked(run, named, mutates=chosen.mutates)
        return DispatchEntry(decision, run, record, provider, case.device.index or 0)

    def _without_waiting(self, chosen: Implementation, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a run of an implementation that raises NotCompiledError instead of waiting for a compiler."""
        asked = False

        def attempted(*args: Any) -> Any:
            nonlocal asked
            if settings().fallback == "forbid":
                return run(*args)
            if asked:
                background.pass_over()
                asked = False
            try:
                return background.attempt(run, args, not chosen.mutates)
            except background.NotCompiledError:
                asked = True
                if chosen.mutates:
                    with contextlib.suppress(background.NotCompiledError):  # to find its other kernels
                        background.attempt(chosen.run, tuple(map(_spare, args)), True)
                raise

        return attempted

    # --- failures ----------------------------------------------------------------------------------------------------
    def _apply_policy(self, case: Case, plan: DispatchEntry) -> None:
        """Raise the error of a broken preferred implementation, or count the fallback, as the setting says."""
        if settings().fallback == "forbid":
            raise self._described(copy.copy(plan.failed[0][1]), case)  # a copy: tracebacks would pile up
        for name, error in plan.failed:
            self._announce(case, name, plan.decision.implementation, error)

    def _recover(
        self, case: Case, plan: DispatchEntry, error: Exception, args: tuple[Any, ...]
    ) -> tuple[DispatchEntry, Any]:
        """Run the remaining implementations in turn from the same inputs; return the plan that ran, and its result."""
        failed: dict[str, Exception] = {}
        if isinstance(error, background.NotCompiledError):
            _ledger.discount(plan.record)
            library = next(candidate for candidate in self.candidates(case) if not candidate.own)
            plan = self._plan(case, library, f"{plan.decision.implementation} is being compiled", plan.decision.refused)
            return plan, self.execute(case, plan, args)
        while True:
            _ledger.failed(plan.record)
            name = plan.decision.implementation
            if isinstance(error, _ArgumentsChangedError):
                self._raise_half_done(case, name, error.error)
            if not recoverable(error):
                lost = plan.provider.lost(error) if isinstance(error, RuntimeError) else None
                if lost is None:
                    for argument in args if isinstance(error, RuntimeError) else ():  # torch's words fill a screen
                        refuse_without_values(argument, f"an argument of {self.name}")
                    raise error
                raise lost from error
            if plan.forced or settings().fallback == "forbid":
                raise self._described(error, case)
            failed[name] = error
            following = next((candidate for candidate in self.candidates(case) if candidate.name not in failed), None)
            if following is None:
                raise self._described(error, case)
            traceback.clear_frames(error.__traceback__)  # its frames hold memory that may be what is lacking
            refused = (*plan.decision.refused, (name, reason_of(error)))
            plan = self._plan(case, following, f"{', '.join(failed)} failed", refused)
            start = _ledger.begin(plan.record, plan.provider, plan.device_index)
            try:
                result = plan.run(*args)
            except Exception as another:  # noqa: BLE001 - sorted at the top of the loop
                error = another
                continue
            except BaseException:
                _ledger.failed(plan.record)
                raise
            if start is not None:
                _ledger.end(plan.record, start, plan.provider, plan.device_index)
            self._leave_out(case, failed)
            for name, failure in failed.items():
                self._announce(case, name, following.name, failure)
            return plan, result

    def _leave_out(self, case: Case, failed: Mapping[str, Exception]) -> None:
        """Exclude implementations that failed for another reason than memory from later calls of the case."""
        lasting = {name: copy.copy(error) for name, error in failed.items() if not is_out_of_memory(error)}
        if lasting:
            if len(self._broken) >= PLANS_LIMIT:
                self._broken.clear()
            self._broken[case] = self._broken.get(case, {}) | lasting
            self.plans.forget(case)

    def _raise_half_done(self, case: Case, name: str, error: Exception) -> None:
        """Raise for an implementation that may have changed its arguments and failed; the next call uses another."""
        self._leave_out(case, {name: error})
        changed = f"{self.name}: {name} may have changed its arguments before it failed"
        text = f"{changed}, so no other implementation followed"
        if is_out_of_memory(error):
            described = self._described(error, case)
            described.add_note(text)
            raise described
        raise AccelerantError(f"{text}. {reason_of(error)}") from error

    def _described(self, error: Exception, case: Case) -> Exception:
        """Return the error, with the op, the bytes and the largest memory owners if torch or the host lacks memory."""
        if not isinstance(error, torch.OutOfMemoryError) and not lacks_host_memory(error):
            return error
        described = OutOfMemory(describe_out_of_memory(self.name, error, case.device))
        described.__cause__ = error
        return described

    def _announce(self, case: Case, preferred: str, ran: str, error: Exception) -> None:
        """Count a fallback, and warn the first time or as the policy says."""
        fallback = FallbackRecord(self.name, f"{case} on {case.device}", preferred, ran, reason_of(error))
        if _ledger.fallback(fallback) or settings().fallback == "warn":
            warnings.warn(
                f"{self.name} ({fallback.case}): {preferred} failed, {ran} ran instead. {fallback.reason}",
                FallbackWarning,
                stacklevel=5,
            )


def _spare(arg: Any) -> Any:
    """Return other memory in place of a tensor of numbers, which may be changed."""
    return torch.empty_like(arg) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg


@functools.lru_cache(maxsize=64)
def _require_declared(forced: tuple[tuple[str, str], ...], where: str = "") -> None:
    """Raise ConfigError for an op that no module declares, or an implementation that it does not have."""
    if any(op not in _operations for op, _ in forced):
        for package in runtime.declaring_packages:
            for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
                if not module.name.endswith((".cases", ".triton_kernels")):
                    importlib.import_module(module.name)
    for op, name in forced:
        if op not in _operations:
            meant, known = similar(op, _operations), ", ".join(sorted(_operations))
            raise ConfigError(f"{where}there is no op {op!r}{meant}; known are {known}")
        _operations[op].named(name, where=where)


def _by_times(
    measured: CandidateTimes | None, serving: Sequence[Implementation], case: str
) -> tuple[Implementation, str, tuple[tuple[str, float], ...], tuple[tuple[str, str], ...]]:
    """Return the fastest implementation, or the first; the reason, the times, and what failed in the race."""
    name = fastest(measured.ms, [candidate.name for candidate in serving]) if measured is not None else None
    if measured is None or name is None:
        return serving[0], "order of preference", (), ()
    times = {candidate.name: measured.ms[candidate.name] for candidate in serving if candidate.name in measured.ms}
    failed = tuple(
        (candidate.name, f"failed in the race of {measured.date}: {measured.failed[candidate.name]}")
        for candidate in serving
        if candidate.name in measured.failed
    )
    others = ", ".join(f"{other} {ms:.4f} ms" for other, ms in times.items() if other != name)
    reason = f"raced {times[name]:.4f} ms" + (f" against {others}" if others else "")
    if times[name] > min(times.values()):
        reason += f", preferred within {MARGIN:.0%}"
    if measured.case and measured.case != case:
        reason += f" at {measured.case}"
    if measured.table:
        reason = f"shipped table for {measured.table}, {reason}"
    else:
        reason += f" ({measured.date}, this device)"
    return next(candidate for candidate in serving if candidate.name == name), reason, tuple(times.items()), failed


class _ArgumentsChangedError(Exception):
    """Carries the failure of an implementation that may have changed its arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _guarded(implementation: Implementation) -> Callable[..., Any]:
    """Return the implementation's run, which wraps failures after which its arguments may have changed."""

    def run(*args: Any) -> Any:
        with Launches() as launched:
            try:
                return implementation.run(*args)
            except Exception as error:
                if not recoverable(error) or (implementation.own and not launched):
                    raise
                raise _ArgumentsChangedError(error) from error

    return run


@contextlib.contextmanager
def force(**implementations: str) -> Iterator[None]:
    """Run one implementation of an op, and no other, within a block: where it refuses or fails, that is an error.

    >>> with force(gelu_fwd="torch"):
    ...     y = accelerant.ops.gelu(x)
    """
    _require_declared(tuple(implementations.items()))
    with override(implementation={**dict(settings().implementation), **implementations}):
        yield
