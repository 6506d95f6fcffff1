"""An optimiser whose steps are private: it wraps one of torch's and passes for it.

    loss.backward()            # adds clipped gradients to .grad (clipping/)
    optimizer.step()           # budget, ledger, noise, division by the expected batch size, the wrapped step
    optimizer.zero_grad()

Schedulers, checkpoints and loops see the wrapped optimiser's groups and state.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerant.errors import BudgetExceeded, ConfigError, UnsupportedCase
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.events import Event, Sampling
from accelerant.privacy.dp.ledger.ledger import Allowance, Budget
from accelerant.privacy.dp.noise.noisy_sum import NoisySum, Plan
from accelerant.privacy.dp.sampling.draw_tracker import Tally
from accelerant.privacy.dp.training.adaptive import AdaptiveNorm
from accelerant.privacy.dp.training.distributed import Processes

__all__ = ["PrivateOptimizer", "require_wide"]

_NOT_OURS = (
    "this batch was not drawn by the sampler of make_private: its steps are accounted without amplification by "
    "sampling, which costs far more epsilon, and an example must not be in two backward passes of a step, which nobody "
    "checks here. Take batches from PrivateTraining.batches(data)"
)

_SEVERAL_ROWS = (
    "this batch was not drawn by the sampler of make_private: it may hold several rows of a group, each with a clipped "
    "gradient, where the ledger counts one. Take batches from PrivateTraining.batches(data)"
)


class PrivateOptimizer(torch.optim.Optimizer):
    """Wraps an optimiser; `make_private` makes it.

    `step` releases (sum of clipped gradients + noise) / expected batch size into `.grad`, calls the wrapped optimiser,
    and leaves the noisy mean in `.grad` until the next forward pass. While only some parts of a drawn batch have been
    through backward (virtual steps), `step` and `zero_grad` do nothing, so that an ordinary loop is right as it
    stands; `stepped` says which it was. What else the wrapped optimiser has (its own clipping of the noisy mean,
    `grad_norm`) is reached through this object.

    Attributes:
        stepped: whether the last call of `step` made one.
        steps: steps made so far.
        expected_batch_size: what the sum is divided by.
        inner: the wrapped optimiser.
        grouped: whether the ledger's unit has several rows: then only what our sampler drew is stepped.
        keeps_gradients: whether gradients are zeroed, and not dropped, after a step: PrivateStep, for its graphs.
    """

    _step_supports_amp_scaling = True  # GradScaler shows itself to step, which refuses it

    def __init__(  # Optimizer's own __init__ is left out: groups, state and hooks are the wrapped optimiser's
        self,
        optimizer: torch.optim.Optimizer,
        clipper: PerExampleClipper,
        release: NoisySum,
        ledger: Ledger,
        *,
        tally: Tally,
        processes: Processes,
        sample_rate: float,
        expected_batch_size: float | None,
        adaptive: AdaptiveNorm | None,
        budget: Budget | None = None,
        grouped: bool = False,
    ) -> None:
        self.inner = optimizer
        self.stepped = False
        self.steps = 0
        self.expected_batch_size = expected_batch_size
        self._clipper = clipper
        self._release = release
        self._ledger = ledger
        self._tally = tally
        self._processes = processes
        self._sample_rate = sample_rate
        self._adaptive = adaptive
        self._allowance = None if budget is None else Allowance(budget, ledger.neighbouring)
        self._params: list[nn.Parameter] = [parameter for _, parameter in clipper.parameters]
        self._clipped = {id(param) for param in self._params}
        self._marks: list[tuple[int, int] | None] = []
        self._bound = 0.0
        self._released = False
        self._updating = False
        self._warned = False
        self._unwatch = _watched(self)
        self.keeps_gradients = False
        self.grouped = grouped
        clipper.on_begin = self._backward_begins
        clipper.on_backward = self._backward_ended
        for param in self._params:
            param.grad = None  # of backward passes before this one, unclipped

    # --- what passes for the wrapped optimiser -----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in Optimizer
        """The wrapped optimiser's."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # as above
        """The wrapped optimiser's."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        """The wrapped optimiser's."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.inner!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivateOptimizer is not pickled or copied: save PrivateTraining.state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's: no key and no noise is in it."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimiser."""
        self.inner.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """On the wrapped optimiser: it sees the noisy mean, ready for the update."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """On the wrapped optimiser."""
        return self.inner.register_step_post_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused.

        Raises:
            UnsupportedCase: always: parameters are clipped from the beginning or not at all.
        """
        raise UnsupportedCase(
            "parameters cannot be added to a private optimizer: detach(), add the group, and call make_private again"
        )

    # --- the step ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; nothing, while parts of an unfinished draw are in them."""
        if not self._tally.held:
            self._clear()
            self._tally.forget()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no closure
        """Release the noisy mean of what was summed, and update the parameters by it.

        Raises:
            BudgetExceeded: the step would pass the budget; nothing was changed.
            ConfigError: no backward pass, an example used twice, gradients changed by hand, no expected batch size; of
                groups, a batch that our sampler did not draw.
            UnsupportedCase: a closure, or a GradScaler; the model is no longer as it was attached.
        """
        self._require_plain(closure)
        self.stepped = False
        if not self._tally.passes:
            self.drop_released()
        plan = self.prepare()
        if plan is None:
            return
        self.update(plan)
        self._released = True  # .grad is the noisy mean now, to be looked at; it is no part of the next sum
        self.finish()

    def prepare(self) -> Plan | None:
        """What a step does before the device has part in it: checks, and the entry in the ledger.

        Returns:
            its noise; None while parts of the draw are still to come.
        """
        if not self._tally.complete:
            self._require_untouched()
            return None
        if self._processes.size == 1 or self._tally.sampled:
            self._tally.require_step()  # of several processes, one may have no batch of its own while others do
        if self.expected_batch_size is None:
            raise ConfigError(
                "the expected batch size is not known: give expected_batch_size, or take batches from batches(data)"
            )
        if self.grouped and not self._tally.sampled:
            raise ConfigError(_SEVERAL_ROWS)
        self.require_as_attached()
        self._require_untouched()
        self._require_clipped()
        plan = self._planned(self.expected_batch_size)
        self._spend(plan)
        return plan

    def update(self, plan: Plan) -> None:
        """What it does on the device: noise, division, the wrapped step. Gradients are left as the update saw them."""
        assert self.expected_batch_size is not None  # for the type checker: prepare looked
        self._noise(plan, self.expected_batch_size)
        self._updating = True
        try:
            self.inner.step()
        finally:
            self._updating = False

    def summed(self, rows: int) -> None:
        """A backward pass over so many rows was replayed: what one that runs tells by itself."""
        self._tally.add(rows)
        self._mark()

    def finish(self) -> None:
        """The end of a step; its gradients stay where they are."""
        self._marks, self._bound = [], 0.0
        if self._tally.sampled:
            self._clipper.mask = None  # it was the draw's
        self._tally.released()
        if self._adaptive is not None:
            self._adaptive.forget()
        self.stepped = True
        self.steps += 1

    @property
    def follows_norms(self) -> bool:
        """Whether each backward pass's norms are looked at: adaptive clipping."""
        return self._adaptive is not None

    def affordable(self) -> bool:
        """Whether the ledger's budget allows one more step, of a batch that our sampler drew."""
        if self.expected_batch_size is None:
            return True
        try:
            event = self._event(self._planned(self.expected_batch_size), "poisson")
            self._require_allowed(event)
            self._ledger.require(event)
        except BudgetExceeded:
            return False
        return True

    def _planned(self, expected: float) -> Plan:
        """Noise and grid of a step at the present clipping norm."""
        multiplier = None
        if self._adaptive is not None:
            self._adaptive.prepare(expected)
            multiplier = self._adaptive.gradient_multiplier
        # The largest bound that was clipped to since the last step: the norm may have been set between.
        return self._release.plan(max(self._bound, self._clipper.sensitivity), multiplier)

    def _event(self, plan: Plan, sampling: Sampling) -> Event:
        """What the ledger is told of a step."""
        note = ""
        if self._adaptive is not None:
            note = self._adaptive.note
            plan = dataclasses.replace(plan, delta=plan.delta + self._adaptive.delta)
        rate = self._sample_rate if sampling == "poisson" else 1.0
        return self._release.event(plan, sampling, rate, idealised=True, note=note)  # summed in floating point

    def _spend(self, plan: Plan) -> None:
        """Record the step in the ledger, before anything of it is seen."""
        sampling: Sampling = "poisson" if self._tally.sampled else "unknown"
        if sampling == "unknown" and not self._warned:
            self._warned = True
            warnings.warn(_NOT_OURS, UserWarning, stacklevel=4)
        event = self._event(plan, sampling)
        self._processes.on_first(lambda: self._record(event))
        if not self._processes.first:
            self._ledger.record(event)  # in memory: what this process answers when it is asked for epsilon

    def _record(self, event: Event) -> None:
        self._require_allowed(event)
        self._ledger.record(event)

    def _require_allowed(self, event: Event) -> None:
        """Check the training's own target, where the ledger, which may serve others, has no budget as tight."""
        if self._allowance is not None:
            self._allowance.require(Counter({each.times(1): each.count for each in self._ledger.events}), event)

    def _noise(self, plan: Plan, expected: float) -> None:
        """The noisy mean into .grad of every clipped parameter, whether this batch reached it or not."""
        with torch.no_grad():
            grads = []
            for param in self._params:
                if param.grad is None and param.requires_grad:  # one that was frozen since stays as it is
                    param.grad = torch.zeros_like(param)
                if param.grad is not None:
                    grads.append(param.grad)
            self._processes.sum_to_first_(grads)
            if self._processes.first:
                self._release.add_(grads, plan, 1.0 / expected)
            self._processes.from_first_(grads)
            if self._adaptive is not None:
                self._adaptive.update(self._clipper, self._processes, expected, self._params[0].device)

    def detach(self) -> None:
        """Give the wrapped optimiser back; a sum that no step has released is cleared."""
        self._unwatch()
        if not self._released:
            self._clear()
            self._tally.forget()

    def drop_released(self, *_: object) -> None:
        """Clear what the last step left in .grad: before a forward pass, or a draw."""
        if self._released:
            self._clear()

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None
        self._released = False
        self.inner.zero_grad()
        self._marks, self._bound = [], 0.0
        if self._adaptive is not None:
            self._adaptive.forget()

    def require_as_attached(self) -> None:
        """Check, before a draw, a pass or a step, that the model is still one whose steps can be private.

        Raises:
            UnsupportedCase: a parameter became 16 bits wide, a frozen BatchNorm was put into train mode; by name.
        """
        for name, parameter in self._clipper.parameters:
            require_wide(name, parameter)
        self._clipper.require_frozen()

    # --- what happens between steps ----------------------------------------------------------------------------------

    def _backward_begins(self) -> None:
        """Nothing but what was summed may be in the gradients: a pass that failed half-way leaves some there."""
        if self._released:
            raise ConfigError(
                "the noisy mean of the last step is still in .grad, and this backward pass would add to it: call "
                "optimizer.zero_grad() after the step"
            )
        if self._tally.passes:
            self._require_untouched()
        elif not self.keeps_gradients:
            self._require_none()

    def _backward_ended(self, norms: Tensor, factors: Tensor) -> None:
        """A backward pass has added its clipped gradients."""
        self._tally.add(norms.numel())
        if self._adaptive is not None:
            self._adaptive.see(norms, self._clipper)
        self._mark()

    def _mark(self) -> None:
        """Remember what was summed: the memory and versions of the gradients, and the bound they were clipped to."""
        self._bound = max(self._bound, self._clipper.sensitivity)
        self._marks = [None if param.grad is None else (id(param.grad), param.grad._version) for param in self._params]

    def _require_untouched(self) -> None:
        if not self._marks:  # an empty draw: there is nothing to release but noise
            self.require_clear()
        for param, mark in zip(self._params, self._marks, strict=bool(self._marks)):
            now = None if param.grad is None else (id(param.grad), param.grad._version)
            if now != mark:
                self._refuse_changed()

    def require_clear(self) -> None:
        """Check, before a draw, that no gradient is there: it would be released with the sum.

        Raises:
            ConfigError: there is one.
        """
        self.drop_released()
        if not self._tally.passes:
            self._require_none()

    def _require_none(self) -> None:
        if any(param.grad is not None for param in self._params):
            raise ConfigError(
                "a parameter has a gradient before the first backward pass of a step, set by hand or by a pass that "
                "failed: clear it with optimizer.zero_grad()"
            )

    def _require_clipped(self) -> None:
        """No other parameter may be updated: one that was frozen when the clipper was attached, say."""
        for group in self.inner.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) not in self._clipped:
                    raise ConfigError(
                        f"a parameter {tuple(param.shape)} of the optimizer has a gradient that is not clipped: it was "
                        "frozen or not there when make_private was called; call it again after detach()"
                    )

    def require_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before the step of any optimiser, that it does not update by a sum that has no noise yet.

        Raises:
            ConfigError: it would: the wrapped optimiser was stepped past this one, or a second one is over its
                parameters.
        """
        if self._updating or self._released:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) in self._clipped:
                    raise ConfigError(
                        f"{type(optimizer).__name__}.step() would update by a sum of gradients without noise, and no "
                        "ledger would know: call step() and zero_grad() of PrivateTraining.optimizer"
                    )

    def _refuse_changed(self) -> NoReturn:
        raise ConfigError(
            "a gradient was changed or cleared between backward and optimizer.step(): what is released must be the "
            "clipped sum. Clip after the noise (accelerant.nn.optim with max_grad_norm), clear with "
            "optimizer.zero_grad()"
        )

    def _require_plain(self, closure: object) -> None:
        if closure is not None:
            raise UnsupportedCase("a private step takes no closure: it would use the examples several times")
        if getattr(self, "grad_scale", None) is not None:
            raise UnsupportedCase(
                "a GradScaler scales the losses, and so what is clipped: use bfloat16 autocast without a scaler"
            )


def require_wide(name: str, parameter: Tensor) -> None:
    """Check that a parameter's gradients can be summed and noised.

    Raises:
        UnsupportedCase: it has 16 bits.
    """
    if parameter.dtype in (torch.bfloat16, torch.float16):
        raise UnsupportedCase(
            f"{name} is {parameter.dtype}, and so would be its sum of clipped gradients, whose rounding may exceed "
            "what one example adds: keep the parameters in float32 and compute under torch.autocast"
        )


def _watched(optimizer: PrivateOptimizer) -> Callable[[], None]:
    """Have it look at each step of any optimiser, until the function that is returned is called."""
    known = weakref.ref(optimizer)

    def before(other: torch.optim.Optimizer, *_: Any) -> None:
        private = known()
        if private is not None:
            private.require_own(other)

    remove: Callable[[], None] = register_optimizer_step_pre_hook(before).remove
    weakref.finalize(optimizer, remove)
    return remove
