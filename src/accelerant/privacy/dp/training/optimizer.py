"""A private optimizer: it wraps one of torch's and can be used in its place.

    loss.backward()            # adds clipped gradients to a sum that is not in .grad (clipping/)
    optimizer.step()           # budget, ledger, noise, division by the expected batch size, the wrapped step
    optimizer.zero_grad()

Schedulers, checkpoints and loops see the wrapped optimizer's groups and state.

An adaptive clipping norm follows a quantile of the gradients' norms, itself found privately:

    C <- C * exp(-learning_rate * (b - quantile)),   b = 1/2 + (sum_i (1[||g_i|| <= C] - 1/2) + N(0, count_std^2)) / m

m is the expected batch size. Andrew, Thakkar, McMahan and Ramaswamy 2021, arXiv:1905.03871, algorithm 1 with the
geometric update. Sum and count together are one Gaussian mechanism: with the multiplier z of the whole, the gradients
get z_delta = (z^-2 - (2 count_std)^-2)^(-1/2) (theorem 1 there; one example moves the centered count by 1/2).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerant.errors import BudgetExceeded, ConfigError, UnsupportedCase
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.clipping.clipper import LARGEST_NORM, LEAST_NORM
from accelerant.privacy.dp.ledger import PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import Allowance, Budget, PrivacyEvent, Sampling, check_number
from accelerant.privacy.dp.noise import NoiseSource
from accelerant.privacy.dp.noise.mechanisms import NoiseParameters, NoisySum
from accelerant.privacy.dp.sampling import DrawTracker
from accelerant.privacy.dp.training.losses import LossCheck
from accelerant.privacy.dp.training.separation import SeparationCheck, running_losses
from accelerant.runtime.processes import Processes

# --- adaptive clipping ------------------------------------------------------------------------------------------------
_COUNT_SENSITIVITY = 0.5
_LEAST_SHARE = 5.0  # least multiplier of the count over the whole's: gradients get 2.1% more noise
_LARGEST_CHANGE = 2.0  # Limit of a step's change, in natural logarithms: with few expected examples the count is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipping:
    """Settings of a clipping norm that follows the norms of the gradients.

    Attributes:
        quantile: of the norms, to which the clipping norm moves; above 0 and below 1.
        learning_rate: of the geometric update.
        count_std: standard deviation of the noise on the count; None: the larger of a twentieth of the expected batch
            size (as the paper has it) and 2.5 times the noise multiplier.

    Raises:
        ConfigError: an invalid value.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_std: float | None = None

    def __post_init__(self) -> None:
        check_number("quantile", self.quantile, most=1.0)
        if self.quantile == 1.0:
            raise ConfigError("quantile must be below 1, got 1.0")
        check_number("learning_rate", self.learning_rate)
        if self.count_std is not None:
            check_number("count_std", self.count_std)


class AdaptiveNorm:
    """The clipping norm of a training, and the noisy counts that move it; `prepare` comes first."""

    def __init__(self, settings: AdaptiveClipping, source: NoiseSource, noise_multiplier: float) -> None:
        self.settings, self._source, self._multiplier = settings, source, noise_multiplier
        self._counts: NoisySum | None = None
        self._below: Tensor | None = None
        self.gradient_multiplier = 0.0  # z_delta
        self.delta, self.note = 0.0, ""  # charged by the noise on the count; for the ledger

    def prepare(self, expected: float) -> None:
        """Divide the noise between gradients and count; ConfigError if count_std leaves nothing for the gradients."""
        if self._counts is not None:
            return
        z, std, least = self._multiplier, self.settings.count_std, self._multiplier * _COUNT_SENSITIVITY
        if std is None:
            std = max(expected / 20.0, _LEAST_SHARE * least)
        if std <= least:
            raise ConfigError(f"count_std must be above half the noise multiplier, {least:g}; got {std:g}")
        self._counts = counts = NoisySum(self._source, std / _COUNT_SENSITIVITY if z else 0.0, 1)
        self.gradient_multiplier = 1.0 / math.sqrt(z**-2 - counts.noise_multiplier**-2) if z else 0.0
        self.delta = counts.plan(_COUNT_SENSITIVITY).delta
        self.note = f"with a count of multiplier {counts.noise_multiplier:.6g} for the clipping norm"

    def count(self, norms: Tensor, clipper: PerExampleClipper) -> None:
        """Count a backward pass's norms; nothing waits for the device."""
        inside = (norms.detach() <= clipper.sensitivity).to(torch.float64) - 0.5  # NaN is not inside
        if clipper.mask is not None:
            inside = inside * clipper.mask.to(inside.device)
        total = inside.sum().reshape(1)
        self._below = total if self._below is None else self._below + total

    def update(self, clipper: PerExampleClipper, processes: Processes, expected: float, device: torch.device) -> None:
        """Move the clipper's norm by the noisy count of the step."""
        count = torch.zeros(1, dtype=torch.float64, device=device) if self._below is None else self._below
        processes.sum_to_first_([count])
        if processes.first and self._counts is not None:
            self._counts.add_([count], self._counts.plan(_COUNT_SENSITIVITY), 1.0)
        processes.from_first_([count])
        share = 0.5 + float(count) / expected
        change = -self.settings.learning_rate * (share - self.settings.quantile)
        moved = clipper.sensitivity * math.exp(min(_LARGEST_CHANGE, max(-_LARGEST_CHANGE, change)))
        clipper.set_bounds(min(LARGEST_NORM, max(LEAST_NORM, moved)))
        self.forget()

    def forget(self) -> None:
        """Reset the count."""
        self._below = None


# --- the optimizer ----------------------------------------------------------------------------------------------------
_FOREIGN_BATCH = (
    "this batch was not drawn by the sampler of make_private: its steps are accounted without amplification by "
    "sampling, which costs far more epsilon, and an example must not be in two backward passes of a step, nor twice in "
    "a batch (sampling with replacement), which nobody checks here: the unit is a row of a batch, and an example of k "
    "rows moves the sum by k times max_grad_norm. Take batches from PrivateTraining.batches(data)"
)

_FOREIGN_GROUPS = (
    "this batch was not drawn by the sampler of make_private: it may hold several rows of a group, each with a clipped "
    "gradient, where the ledger counts one. Take batches from PrivateTraining.batches(data)"
)

_WITHHELD = (
    "the sum of clipped gradients is not in .grad until optimizer.step() has added noise: a value computed from "
    "it, or a change of it, would break the guarantee. After the step .grad holds the noisy mean. Leave sums over "
    "processes to the step, clip after the noise (accelerant.nn.optim with max_grad_norm), clear with "
    "optimizer.zero_grad()"
)

_SCALED = "a GradScaler scales the losses, and so what is clipped: use bfloat16 autocast without a scaler"

_CHANGED = (
    "a gradient was changed or cleared between backward and optimizer.step(): what is released must be the clipped "
    "sum. Clip after the noise (accelerant.nn.optim with max_grad_norm), clear with optimizer.zero_grad()"
)

_BEFORE = (
    "a parameter has a gradient before the first backward pass of a step, set by hand or by a pass that failed: clear "
    "it with optimizer.zero_grad()"
)


_PLATEAU = (
    "ReduceLROnPlateau follows a metric: if it is a loss or norm of the private data, the learning rate reveals it, "
    "and no ledger counts that. Give it a metric of public data, or of dp.release, or plan the rate in advance"
)

_SETTER = "__set__"  # of which torch's annotations do not know


class _Withheld(Tensor):
    """A `.grad` between backward and step: it holds no number, and a use of its values raises ConfigError."""

    _DESCRIPTION: ClassVar = frozenset([
        Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex,
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "nbytes", "dtype", "device", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_cuda", "requires_grad")), Tensor.element_size,
        # Module.to(), and its relatives, convert the gradients, too.
        Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
        getattr(Tensor.data, _SETTER), Tensor.requires_grad_, torch._has_compatible_shallow_copy_type,
    ])  # fmt: skip

    @classmethod
    def of(cls, param: Tensor) -> _Withheld:
        """Return one for a parameter; it takes the memory of one number."""
        with torch._C.DisableTorchFunctionSubclass():
            number = torch.full((), torch.nan, dtype=param.dtype, device=param.device)
            return number.expand(param.shape).as_subclass(cls)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has options
        return f"_Withheld({tuple(self.shape)}, until step() has added the noise)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._DESCRIPTION or TracingContext.try_get() is not None:  # torch.compile describes it at length
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's own
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise UnsupportedCase(_SCALED)
        raise ConfigError(_WITHHELD)


class PrivateOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer; created by `make_private`.

    Backward passes add clipped gradients to a sum that is kept here. `.grad` cannot be used until the step, so that
    nothing but the step changes or releases the sum. `step` releases (sum + noise) / expected batch size into `.grad`,
    calls the wrapped optimizer, and leaves the noisy mean in `.grad` until the next forward pass. While only some parts
    of a drawn batch have been through backward (virtual steps), `step` and `zero_grad` do nothing, so that an ordinary
    loop works unchanged; `stepped` tells which it was. Other attributes of the wrapped optimizer (its own clipping of
    the noisy mean, `grad_norm`) are reached through this object.

    Attributes:
        stepped: whether the last call of `step` made one.
        separation: checks the first batch's examples.
        losses: checks that the loss treats each example by itself.
        grouped: whether the ledger's unit has several rows: then only batches of our sampler may be stepped.
        precision: of `PrivateStep`'s autocast; None without one.
        sums: of clipped gradients, by their parameter's identity.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler shows itself to step, which refuses it

    def __init__(  # Optimizer.__init__ is not called: groups, state and hooks are the wrapped optimizer's
        self, optimizer: torch.optim.Optimizer, clipper: PerExampleClipper, release: NoisySum, ledger: PrivacyLedger, *,
        processes: Processes, sample_rate: float, expected_batch_size: float | None, adaptive: AdaptiveNorm | None,
        budget: Budget | None = None, grouped: bool = False,
    ) -> None:  # fmt: skip
        self.inner, self.expected_batch_size = optimizer, expected_batch_size
        self.stepped, self.steps = False, 0  # whether the last call of `step` made one, and how many were made
        self.sums: dict[int, Tensor] = {}  # of clipped gradients, by their parameter's identity
        self.grouped = grouped  # the ledger's unit has several rows: only batches of our sampler may be stepped
        self.precision: torch.dtype | None = None  # of PrivateStep's autocast
        self.clipper, self.ledger, self.processes, self.tracker = clipper, ledger, processes, DrawTracker()
        self.separation, self.losses = SeparationCheck(clipper), LossCheck(clipper)
        self._release, self._adaptive, self._sample_rate = release, adaptive, sample_rate
        self._allowance = None if budget is None else Allowance(budget, ledger.neighbouring)
        self._params: list[nn.Parameter] = [parameter for _, parameter in clipper.parameters]
        self._clipped = {id(param) for param in self._params}
        self._versions: dict[int, int] = {}  # of the sums at the end of the last pass
        self._withheld: dict[int, Tensor] = {}  # .grad of the parameters with a sum
        self._spare: dict[int, tuple[Any, Tensor]] = {}  # the same, for the next step, with dtype and device
        self._bound = 0.0  # the largest that was clipped to since the last step
        self._released = False  # .grad is the noisy mean
        self._updating = False
        self._warned = self._warned_of_plateau = False
        self._threads: Any = None  # restores autograd's own threads
        _watching.add(self)
        clipper.keep_sums(self.sums)
        clipper.on_begin = self._backward_begins
        clipper.on_labels = self.losses.check_labels
        clipper.on_backward = self._backward_ended
        for param in self._params:
            param.grad = None  # of earlier backward passes, unclipped

    # --- the wrapped optimizer's interface ---------------------------------------------------------------------------
    # Without a setter, so that an assignment raises instead of hiding the wrapped optimizer's attribute.
    state: Any = property(lambda self: self.inner.state)
    defaults: Any = property(lambda self: self.inner.defaults)
    state_dict: Any = property(lambda self: self.inner.state_dict)  # no key and no noise is in it
    load_state_dict: Any = property(lambda self: self.inner.load_state_dict)
    register_step_pre_hook: Any = property(lambda self: self.inner.register_step_pre_hook)  # it sees the noisy mean
    register_step_post_hook: Any = property(lambda self: self.inner.register_step_post_hook)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # an attribute there
        """The groups of the wrapped optimizer; a warning if ReduceLROnPlateau asks for them."""
        if not self._warned_of_plateau and (caller := sys._getframe(1)).f_code.co_filename == lr_scheduler.__file__:
            self._warned_of_plateau = isinstance(caller.f_locals.get("self"), lr_scheduler.ReduceLROnPlateau)
            if self._warned_of_plateau:
                warnings.warn(_PLATEAU, UserWarning, stacklevel=3)
        return self.inner.param_groups

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity of the sum."""
        return self._release.noise_multiplier

    @property
    def sample_rate(self) -> float:
        """Rate of the Poisson sampling that the ledger records."""
        return self._sample_rate

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.inner!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivateOptimizer is not pickled or copied: save PrivateTraining.state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise UnsupportedCase: parameters are clipped from the beginning or not at all."""
        raise UnsupportedCase(
            "parameters cannot be added to a private optimizer: detach(), add the group, and call make_private again"
        )

    # --- the step ----------------------------------------------------------------------------------------------------
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless parts of an unfinished draw are in them."""
        if not self.tracker.held:
            self._clear()
            self.tracker.forget()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no closure
        """Release the noisy mean of the sum, and update the parameters by it.

        Raises:
            BudgetExceeded: the step would pass the budget; nothing was changed.
            ConfigError: no backward pass, an example used twice, gradients changed by hand, no expected batch size;
                with groups, a batch that our sampler did not draw.
            UnsupportedCase: a closure, or a GradScaler; the model is no longer as it was attached.

        Of several processes, each raises the error of any, and ConfigError if they do not agree on what is released.
        """
        if closure is not None:
            raise UnsupportedCase("a private step takes no closure: it would use the examples several times")
        if getattr(self, "grad_scale", None) is not None:
            raise UnsupportedCase(_SCALED)
        self.stepped = False
        self.losses.end()
        if not self.tracker.passes:
            self.drop_released()
        plan = self.prepare()
        if plan is None:
            return
        self.update(plan)
        self._released = True
        self.sums.clear()  # they are the noisy means in .grad
        self.finish()

    def prepare(self, learning_rate: float | None = None) -> NoiseParameters | None:
        """Check a step, enter it in the ledger, and return its noise; None while parts of the draw are missing."""
        if not self.tracker.complete:
            self.require_untouched()
            return None
        agreed: dict[str, object] = {}
        with self.processes.agreed(agreed):  # rank 0's noise must cover the sums of all
            expected = self._checked()
            plan = self._plan(expected)
            sampling: Sampling = "poisson" if self.tracker.sampled else "unknown"
            agreed["clipping norm"] = max(self._bound, self.clipper.sensitivity)
            agreed["sampling"], agreed["expected batch size"] = sampling, expected
            agreed["noise"], agreed["precision"] = plan, f"{self.precision or self._params[0].dtype}"
            if self.processes.size > 1:  # the sums of the others would meet other parameters' here
                trained = [name for name, x in self.clipper.parameters if x.requires_grad or id(x) in self.sums]
                agreed["trained parameters"] = trained
                agreed |= settings_of(self.inner)  # else the parameters part, and the next sum is of several models
                if learning_rate is not None:
                    agreed["learning rate"] = float(learning_rate)
        if sampling == "unknown" and not self._warned:
            self._warned = True
            warnings.warn(_FOREIGN_BATCH, UserWarning, stacklevel=3)
        event = self._event(plan, sampling)

        def record() -> None:
            self._require_allowed(event)
            self.ledger.record(event)  # before any result of the step exists

        self.processes.on_first(record)
        if not self.processes.first:
            self.ledger.record(event)  # in memory, for this process's epsilon()
        return plan

    def _checked(self) -> float:
        """Check a step; return the expected batch size."""
        if self.processes.size == 1 or self.tracker.sampled:
            self.tracker.require_step()  # of several processes, one may have no batch of its own while others do
        if self.expected_batch_size is None:
            raise ConfigError(
                "the expected batch size is not known: give expected_batch_size, or take batches from batches(data)"
            )
        if self.grouped and not self.tracker.sampled:
            raise ConfigError(_FOREIGN_GROUPS)
        self.require_as_attached()
        self.require_untouched()
        for param in _held(self.inner):
            if param.grad is not None and id(param) not in self._clipped:
                raise ConfigError(
                    f"a parameter {tuple(param.shape)} of the optimizer has a gradient that is not clipped: it was "
                    "frozen or not there when make_private was called; call it again after detach()"
                )
        return self.expected_batch_size

    def update(self, plan: NoiseParameters) -> None:
        """Run the device's part of a step; `.grad` of each clipped parameter is the noisy mean afterwards."""
        expected = self.expected_batch_size
        assert expected is not None  # for the type checker: prepare checked it
        with torch.no_grad():
            for param in self._params:
                if param.requires_grad and id(param) not in self.sums:  # one that was frozen since stays as it is
                    self.sums[id(param)] = torch.zeros_like(param)
            summed = [param for param in self._params if id(param) in self.sums]
            grads = [self.sums[id(param)] for param in summed]
            self.processes.sum_to_first_(grads)
            if self.processes.first:
                self._release.add_(grads, plan, 1.0 / expected)
            self.processes.from_first_(grads)
            if self._adaptive is not None:
                self._adaptive.update(self.clipper, self.processes, expected, self._params[0].device)
            for param, grad in zip(summed, grads, strict=True):
                param.grad = self.clipper.run_hooks(param, grad.to(param))  # the model may have been moved since
        self._updating = True
        try:
            self.inner.step()
        finally:
            self._updating = False

    def summed(self, rows: int) -> None:
        """Count a replayed backward pass over `rows` rows; a replay runs no hooks."""
        self.require_untouched()
        self.tracker.add(rows)
        self._mark()

    def finish(self) -> None:
        """End a step, after which sums that are kept are zero, and `.grad` is the noisy mean if `step` left it."""
        self._withheld, self._bound = {}, 0.0
        if not self._released:
            for param in self._params:
                param.grad = None
        self.mark()
        if self.tracker.used:
            self.clipper.mask = None  # it was the draw's
        self.tracker.released()
        self._release_thread()
        self.stepped = True
        self.steps += 1

    @property
    def follows_norms(self) -> bool:
        """Whether the host reads each backward pass's norms: for adaptive clipping."""
        return self._adaptive is not None

    def affordable(self) -> bool:
        """Return whether the ledger's budget allows one more step, of a batch that our sampler drew."""
        if self.expected_batch_size is None:
            return True
        try:
            event = self._event(self._plan(self.expected_batch_size), "poisson")
            self._require_allowed(event)
            self.ledger.require(event)
        except BudgetExceeded:
            return False
        return True

    def _plan(self, expected: float) -> NoiseParameters:
        """Return noise and grid of a step at the present clipping norm, which may have been set between passes."""
        multiplier = None
        if self._adaptive is not None:
            self._adaptive.prepare(expected)
            multiplier = self._adaptive.gradient_multiplier
        return self._release.plan(max(self._bound, self.clipper.sensitivity), multiplier)

    def _event(self, plan: NoiseParameters, sampling: Sampling) -> PrivacyEvent:
        unit, notes = self.ledger.unit, []
        if unit != "example":  # the reader of the ledger cannot see what its maker called so
            notes.append(f"one row of each drawn {unit}" if self.grouped else f"each row counts as one {unit}")
        if self._adaptive is not None:
            notes.append(self._adaptive.note)
            plan = dataclasses.replace(plan, delta=plan.delta + self._adaptive.delta)
        rate = self._sample_rate if sampling == "poisson" else 1.0
        return self._release.event(plan, sampling, rate, idealised=True, note="; ".join(notes))  # floating point

    def _require_allowed(self, event: PrivacyEvent) -> None:
        """Check the training's own target, where the ledger, which may serve others, has no budget as tight."""
        if self._allowance is not None:
            self._allowance.require(self.ledger.counts, event)

    # --- between steps -----------------------------------------------------------------------------------------------
    def detach(self) -> None:
        """Release the wrapped optimizer; a sum that no step has released is cleared."""
        _watching.discard(self)
        self.losses.end()
        self._release_thread()
        self.clipper.keep_sums(None)
        if not self._released:
            self._clear()
            self.tracker.forget()

    def drop_released(self, *_: object) -> None:
        """Clear the noisy mean that the last step left in .grad: before a forward pass, or a draw."""
        if self._released:
            self._clear()

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None
        self._released = False
        self.inner.zero_grad()
        self.sums.clear()
        self._versions, self._withheld, self._bound = {}, {}, 0.0
        if self._adaptive is not None:
            self._adaptive.forget()

    def _backward_begins(self) -> None:
        """Check that the sums are of finished passes alone: a pass that failed half-way leaves others."""
        if self._released:
            raise ConfigError(
                "the noisy mean of the last step is still in .grad, and this backward pass would add to it: call "
                "optimizer.zero_grad() after the step"
            )
        self.require_untouched()
        self.separation.before_backward(running_losses)
        self.losses.check(running_losses, self.separation.misfit)

    def keep_thread(self) -> None:
        """Let backward passes over a GPU run on this thread, until the step: the layers' functions are Python's."""
        if self._threads is None and self._params[0].is_cuda:
            self._threads = torch.autograd.set_multithreading_enabled(False)

    def _release_thread(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            torch.autograd.set_multithreading_enabled(threads.prev)

    def _backward_ended(self, norms: Tensor, factors: Tensor) -> None:
        self.tracker.add(norms.numel())
        if self._adaptive is not None:
            self._adaptive.count(norms, self.clipper)
        self._mark()

    def _mark(self) -> None:
        """Remember the bound that the sum was clipped to, and put nothing that is of use into `.grad`."""
        self._bound = max(self._bound, self.clipper.sensitivity)
        for param in self._params:
            key = id(param)
            if key in self.sums and key not in self._withheld:
                kind, spare = self._spare.get(key, (None, None))
                if spare is None or kind != (param.dtype, param.device):
                    spare = _Withheld.of(param)
                    self._spare[key] = (param.dtype, param.device), spare
                param.grad = self._withheld[key] = spare
        self.mark()

    def mark(self) -> None:
        """Take the sums for complete: a change before the end of the next backward pass is refused."""
        self._versions = {key: total._version for key, total in self.sums.items()}

    # --- checks ------------------------------------------------------------------------------------------------------
    def require_as_attached(self) -> None:
        """Raise UnsupportedCase if a parameter became 16 bits wide, or a frozen BatchNorm is in train mode."""
        for name, parameter in self.clipper.parameters:
            require_float32(name, parameter)
        self.clipper.require_frozen()

    def require_clear(self) -> None:
        """Raise ConfigError, before a draw, if there is a gradient: it would be released with the sum."""
        self.drop_released()
        if not self.tracker.passes:
            self.require_untouched()

    def require_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before the step of any optimizer, that it does not update by a sum that has no noise yet."""
        if self._updating or self._released:
            return
        if any(param.grad is not None and id(param) in self._clipped for param in _held(optimizer)):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() would update by a sum of gradients without noise, and no ledger "
                "would know: call step() and zero_grad() of PrivateTraining.optimizer"
            )

    def require_untouched(self) -> None:
        """Raise ConfigError if a `.grad` was replaced, or a sum is not that of finished backward passes."""
        if any(param.grad is not self._withheld.get(id(param)) for param in self._params):
            raise ConfigError(_CHANGED if self._withheld else _BEFORE)
        if any(total._version != self._versions.get(key) for key, total in self.sums.items()):
            raise ConfigError(_BEFORE)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return class and options of an optimizer, each with its value in every group, for processes to compare."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    own = {
        name: value for name, value in optimizer.defaults.items() if any(group.get(name) != value for group in groups)
    }  # accelerant.nn.optim reads some there
    named = dict.fromkeys(name for group in groups for name in group)
    found: dict[str, object] = {"optimizer": type(optimizer).__name__}
    found |= {f"optimizer's {name}": [as_number(group.get(name)) for group in groups] for name in named}
    return found | {f"optimizer's default {name}": as_number(value) for name, value in own.items()}


def as_number(value: Any) -> object:
    """Return an option's value as text shows it: 1, 1.0 and tensors of them are the same."""
    if isinstance(value, Mapping):
        return {name: as_number(each) for name, each in sorted(value.items())}
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_number(each) for each in value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_watching: weakref.WeakSet[PrivateOptimizer] = weakref.WeakSet()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for private in list(_watching):
        private.require_own(optimizer)


# Once: a hook that went with its private optimizer could be removed, by the garbage collector, while torch calls hooks.
register_optimizer_step_pre_hook(_before_step)


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def require_float32(name: str, parameter: Tensor) -> None:
    """Raise UnsupportedCase if a parameter has 16 bits or fewer: the sum of its gradients would have them, too."""
    if parameter.dtype.itemsize < 4:
        raise UnsupportedCase(
            f"{name} is {parameter.dtype}, and so would be its sum of clipped gradients, whose rounding may exceed "
            "what one example adds: keep the parameters in float32 and compute under torch.autocast"
        )
