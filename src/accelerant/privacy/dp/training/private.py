"""`make_private`: makes an ordinary training loop differentially private; `PrivacyEngine`: the interface of Opacus.

DP-SGD: Abadi et al. 2016, arXiv:1607.00133, algorithm 1, with Poisson sampling and add-or-remove-one neighbours.

Of several processes each clips the examples of its share of the data. The sums go to rank 0, which alone draws noise
and writes the ledger, and sends the noisy sum back: a sum of discrete Gaussians is not one (Kairouz, Liu and Steinke
2021, arXiv:2102.06387). Every process is trusted. They must agree on the settings at the start, and before each step on
all that decides the noise.

`PrivacyEngine`: the interface of Opacus over `make_private`, for programs that were written for Opacus.

    engine = PrivacyEngine()
    model, optimizer, data_loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data_loader, noise_multiplier=1.1, max_grad_norm=1.0)
    ...                                         # the loop as it was
    print(engine.get_epsilon(delta=1e-5))

What would void the guarantee is refused: batches are Poisson draws, and noise is secure. See docs/from-opacus.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from accelerant._renamed import missing_arguments, understood_arguments
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.privacy.dp import sampling
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.clipping.clipper import require_norm
from accelerant.privacy.dp.clipping.rules import mark
from accelerant.privacy.dp.ledger import Budget, LedgerLike, PrivacyLedger, ledger_path
from accelerant.privacy.dp.ledger.accounting import DEFAULT_DELTA, check_number, check_whole
from accelerant.privacy.dp.noise.mechanisms import NoisySum, make_source, require_clipped_unit
from accelerant.privacy.dp.sampling import warn_of_repeats
from accelerant.privacy.dp.training.gradients import least_noise
from accelerant.privacy.dp.training.optimizer import (
    AdaptiveClipping,
    AdaptiveNorm,
    PrivateOptimizer,
    as_number,
    require_float32,
    settings_of,
)
from accelerant.runtime.processes import Processes

Clipping = Literal["flat", "per_layer", "adaptive"]

_private: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # with a clipper attached: no second one may be

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class PrivateTraining:
    """A private training, created by `make_private`; a context manager that detaches and closes at its end.

    Attributes:
        model: the given module; its backward passes clip now.
        optimizer: replaces the given one.
        ledger: of the steps. In several processes rank 0 writes it, the others keep a copy in memory.
        clipper: per-example norms and factors of the last backward pass.
        noise_multiplier: standard deviation of the noise over the sensitivity of the sum.
        delta, steps: as given.
    """

    def __init__(
        self, model: nn.Module, optimizer: PrivateOptimizer, arguments: _TrainingArguments, *, owns_ledger: bool
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.ledger, self.clipper = optimizer.ledger, optimizer.clipper
        self.noise_multiplier = optimizer.noise_multiplier
        self.delta, self.steps = arguments.delta, arguments.steps
        self._microbatch, self._units, self._owns_ledger = arguments.microbatch, arguments.units, owns_ledger
        self._tracker, self._processes = optimizer.tracker, optimizer.processes
        self._warned_of_delta = False
        self._derived: float | None = None  # expected batch size from the number of units, kept out of states
        self._samplers: weakref.WeakSet[sampling.PoissonSampler] = weakref.WeakSet()
        self._returned: sampling.DrawnBatch | None = None  # by `batches`, and not declared again since
        self._attached = True
        known, own = weakref.ref(optimizer), weakref.ref(model)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            private = known()
            if private is not None and torch.is_grad_enabled():
                _require_unwrapped(module)
            if private is not None and module is own():  # not a copy of it
                private.losses.enter_model((args, kwargs), trial=private.separation.running)
                if torch.is_grad_enabled():
                    private.require_as_attached()
                private.drop_released()
                if torch.is_grad_enabled():
                    private.keep_thread()
                if torch.is_grad_enabled() and not private.separation.running:
                    private.separation.before_forward(args, kwargs)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
        def after_forward(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            private = known()
            if private is not None and module is own():
                private.losses.leave_model((args, kwargs), result, trial=private.separation.running)

        self._hooks = [
            model.register_forward_pre_hook(mark(before_forward), with_kwargs=True),
            model.register_forward_hook(mark(after_forward), with_kwargs=True, always_call=True),
        ]

    @property
    def sample_rate(self) -> float:
        """As given; the ledger records it, so it cannot be set."""
        return self.optimizer.sample_rate

    def batches(
        self, data: Any, *, microbatch: int | None = None, steps: int | None = None,
        sampler: sampling.PoissonSampler | None = None,
    ) -> Generator[sampling.DrawnBatch, None, None]:  # fmt: skip
        """Draw batches from the data by Poisson sampling, each in one or more parts, for an ordinary loop.

        Each row, or one row of each group, is in each draw with probability sample_rate, independently: batches vary in
        size and may be empty. The padding of a part is masked in the clipper. Each of several processes draws from
        rows (rank, rank + size, ...), or groups, of its own.

        Args:
            data: tensors of as many rows each in a tuple, a Dataset, or other data of PoissonBatches. In each process
                the same rows in the same order, else a row could be in two shares.
            microbatch: rows of a part; None: as given to `make_private`, else a draw is one part.
            steps: draws; None: those that are left of the planned steps, else one pass (1 / sample_rate).
            sampler: another of `sampling` that draws at sample_rate.

        Raises:
            ConfigError: an invalid value; later, when a draw was not stepped.
            ShapeError: groups are of other data.
        """
        return self._used(self._draws(data, microbatch=microbatch, steps=steps, sampler=sampler))

    @property
    def draws(self) -> NoReturn:
        """Refuse the name of earlier versions."""
        raise AttributeError("PrivateTraining.draws is PrivateTraining.batches now")

    def _draws(
        self, data: Any, *, microbatch: int | None = None, steps: int | None = None,
        sampler: sampling.PoissonSampler | None = None,
    ) -> sampling.PoissonBatches:  # fmt: skip
        """Draw as `batches` does; `use` is to be called before the forward pass of each part."""
        if not self._attached:
            raise ConfigError("this private training was detached: call make_private again")
        self.optimizer.require_as_attached()
        if steps is None:
            steps = round(1 / self.sample_rate) if self.steps is None else max(0, self.steps - self.optimizer.steps)
        if sampler is None:
            rows, processes = sampling.rows_of(data), self._processes
            count = self._units.number(rows)
            sampler = self._units.sampler(rows, self.sample_rate, steps, rank=processes.rank, size=processes.size)
            self._samplers.add(sampler)
        else:
            self._require_sampler(sampler)
            count = sampler.size
        if not self._warned_of_delta and (remark := self.remark_on_delta(count)):
            warnings.warn(remark, UserWarning, stacklevel=3)
        self.ledger.describe(units=count)
        if self.optimizer.expected_batch_size is None:
            self._derived = self.optimizer.expected_batch_size = self.sample_rate * count
        return sampling.PoissonBatches(data, sampler, microbatch=self._microbatch if microbatch is None else microbatch)

    def remark_on_delta(self, count: int) -> str:
        """Return a warning if delta is too large for `count` units, else ""; `batches` does not warn of it again."""
        self._warned_of_delta = True
        return sampling.delta_remark(self.delta, count, self.ledger.unit)

    def use(self, batch: sampling.DrawnBatch, origin: object = None) -> None:
        """Declare that the next forward and backward pass is of this part of a draw; `batches` does it for its parts.

        Of the part that `batches` returned last a first call changes nothing.

        Args:
            origin: the same object for all parts of a draw, where draws may be left unfinished.

        Raises:
            ConfigError: the previous draw was summed and not stepped; the part was drawn at another rate, or from rows
                where groups are drawn.
            UnsupportedCase: the model is no longer as it was attached (16-bit parameters, BatchNorm in train mode).
        """
        self.optimizer.require_as_attached()
        returned, self._returned = self._returned, None
        if returned is batch and origin is None:
            return
        if batch.sampler is not None and batch.sampler not in self._samplers:
            self._require_sampler(batch.sampler)
        self._tracker.begin(batch, origin)
        device = self.clipper.parameters[0][1].device
        # Waiting for this copy would wait for the step before.
        self.clipper.mask = None if batch.mask is None else batch.mask.to(device, non_blocking=True)
        self.optimizer.losses.begin((batch.tensors, batch.mask))

    def _used(self, batches: sampling.PoissonBatches) -> Generator[sampling.DrawnBatch, None, None]:
        try:
            parts = iter(batches)
            while True:
                self.optimizer.require_as_attached()
                if (batch := next(parts, None)) is None:
                    return
                self.optimizer.require_clear()
                self.use(batch, batches)
                self._returned = batch
                yield batch
        finally:
            self._returned = None
            self.optimizer.losses.end()
            if not self._tracker.awaited:  # next(batches(...)) ends this before the batch is used: it stays masked
                self.clipper.mask = None

    def _require_sampler(self, sampler: sampling.PoissonSampler) -> None:
        """Check a user's sampler: the ledger records this training's rate, which must be the sampler's."""
        sampling.require_sampler(sampler, self.sample_rate, self.ledger, self._units, self._processes.size)
        self.optimizer.grouped = self.optimizer.grouped or isinstance(sampler, sampling.GroupedSampler)
        self._samplers.add(sampler)

    def step(self) -> bool:
        """Call optimizer.step() and zero_grad(); return whether a step was made: not before a draw's last part."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.stepped

    def epsilon(self, delta: float | None = None, method: Literal["pld", "rdp"] = "pld") -> float:
        """Return the epsilon of all recorded events at delta, or that of `make_private`; infinity without noise."""
        return self.ledger.epsilon(self.delta if delta is None else delta, method=method)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: optimizer, clipping norm, steps, the ledger's events.

        No key, no noise, and nothing of the data: an expected batch size that `batches` derived from it is left out.

        The noise and the draws of a resumed training are fresh: a repeated key would let two noisy sums be subtracted.
        """
        norm, expected = self.clipper.max_grad_norm, self.optimizer.expected_batch_size
        return {
            "version": 1,
            "optimizer": self.optimizer.state_dict(),
            "max_grad_norm": dict(norm) if isinstance(norm, Mapping) else norm,
            "noise_multiplier": self.noise_multiplier,
            "expected_batch_size": None if expected == self._derived else expected,
            "steps": self.optimizer.steps,
            "unit": self.ledger.unit,
            "grouped": self._units.groups is not None,  # a digest would confirm a guess of one user
            "spent": self.ledger.by_run(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. The ledger is not rewound: steps done since then stay spent.

        Events of the state that the ledger lacks (of a training in memory, or of another file) are recorded, those of
        each run once (`PrivacyLedger.merge`). A state of an older version names no runs: all its events are recorded.

        Raises:
            FormatError: it is no such state, has another noise multiplier or unit, or only one of the two has groups.
                Whether groups are the same is not checked: a state that described them would not be private.
            BudgetExceeded: the recorded events pass the ledger's budget.
        """
        lacking = {"optimizer", "max_grad_norm", "noise_multiplier", "expected_batch_size", "steps"} - state.keys()
        if state.get("version") != 1 or lacking:
            raise FormatError(f"not the state of a private training: version {state.get('version')!r}, lacks {lacking}")
        noise, unit = state["noise_multiplier"], state.get("unit", self.ledger.unit)
        if noise != self.noise_multiplier:
            raise FormatError(
                f"the state has noise_multiplier {noise}, this training has {self.noise_multiplier}: give make_private "
                "the same"
            )
        if unit != self.ledger.unit:
            raise FormatError(
                f"the state's unit is {unit!r}, this training's is {self.ledger.unit!r}: what the two spend does not "
                "add up"
            )
        if state.get("grouped", False) != (self._units.groups is not None):
            raise FormatError(
                "only one of the state's training and this one has groups of rows: what they spend is of different "
                "units. Give make_private the same groups"
            )
        self.ledger.merge(state.get("spent", {}))
        self.optimizer.load_state_dict(state["optimizer"])
        self.clipper.set_bounds(state["max_grad_norm"])
        if state["expected_batch_size"] is not None:
            self.optimizer.expected_batch_size = state["expected_batch_size"]
        self.optimizer.steps = int(state["steps"])

    def detach(self) -> None:
        """Detach the clipper: backward passes of the model are ordinary again. The ledger stays open."""
        if self._attached:
            self._attached = False
            for hook in self._hooks:
                hook.remove()
            self.clipper.detach()
            self.clipper.on_begin = self.clipper.on_backward = None
            self.optimizer.detach()
            _private.discard(self.model)

    def close(self) -> None:
        """Detach, and close the ledger if `make_private` opened it."""
        self.detach()
        if self._owns_ledger:
            self.ledger.close()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivateTraining is not pickled or copied: save state_dict(), and the model separately")

    def __repr__(self) -> str:
        return (
            f"PrivateTraining({type(self.model).__name__}, noise_multiplier={self.noise_multiplier:.6g}, "
            f"sample_rate={self.sample_rate:.6g}, delta={self.delta:g}, steps done {self.optimizer.steps})"
        )


@understood_arguments(module="model", target_delta="delta", sigma="noise_multiplier", q="sample_rate")
@missing_arguments(
    data_loader="sample_rate=1 / len(loader) and private.batches(dataset), or dp.PrivacyEngine().make_private",
    epochs="steps=, the number of batches of all epochs",
    clip="max_grad_norm=",
    poisson_sampling="batches of your own, which are accounted without amplification",
    secure_mode="the call without it: the noise is secure unless insecure=True",
)
def make_private(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, noise_multiplier: float | None = None,
    target_epsilon: float | None = None, steps: int | None = None, delta: float,
    max_grad_norm: float | Mapping[str, float], sample_rate: float, expected_batch_size: float | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean", clipping: Clipping | AdaptiveClipping = "flat",
    insecure: bool = False, microbatch: int | None = None, ledger: LedgerLike = None,
    groups: Tensor | Sequence[int | str] | NDArray[Any] | None = None, secure: bool | None = None,
) -> PrivateTraining:  # fmt: skip
    """Make the training of a model differentially private.

    One example is one entry of dimension 0 of a batch (of a language model: a row of tokens). Neighbouring data sets
    differ by one example, or with groups by one group, added or removed. The update is (sum of clipped gradients +
    noise) / expected batch size. Trust: the trainer sees the data; draws and noise stay secret. Private are the
    parameters, and what is computed from them and from other data; the losses of the training are not.

    Args:
        model: of layers with exact per-example gradients; what mixes examples is refused by name (BatchNorm, unless it
            is frozen and in eval mode). Copies of it, and files, are ordinary models.
        optimizer: of torch or of accelerant.nn.optim, over all parameters that require a gradient.
        noise_multiplier: standard deviation of the noise over the sensitivity, max_grad_norm; 0 is allowed and gives no
            privacy: epsilon is infinite. Give this or target_epsilon.
        target_epsilon: of `steps` steps, with what the ledger holds already; the noise multiplier is found for it, and
            the step that would pass it raises BudgetExceeded.
        steps: planned; needed with target_epsilon.
        delta: of (epsilon, delta); below one over the number of examples.
        max_grad_norm: the L2 norm to which each example's gradient is clipped; by layer names with "per_layer".
        sample_rate: the probability of each example, or group, to be in a batch.
        expected_batch_size: of all processes together; None: sample_rate times the rows, or groups, of the data that
            `batches` is given.
        loss_reduction: whether a batch's loss is the "mean" or the "sum" of its examples' losses. Each must be of that
            example alone, with the same share whatever the others are: not a mean that class weights, ignored labels
            or masks of the batch divide (average the tokens of a row first), nor a loss that compares examples. In the
            first backward passes, and then at random, the loss is repeated with other rows, and refused if it mixes
            them.
        clipping: "flat": over all parameters; "per_layer": sensitivity is the root of the sum of squares; "adaptive":
            the norm follows the median of the gradients' norms, `AdaptiveClipping` has its settings.
        insecure: noise from Philox in floating point, for research, instead of ChaCha20 on an integer grid; the ledger
            records it.
        microbatch: rows of a part of a draw (virtual steps); None: as given to `batches`, else a draw is one part.
        ledger: a PrivacyLedger or its file, which may hold earlier trainings on the same data; None: in memory.
        groups: (N,), the owner of each row of the data, for example a user's number or name; the same in all
            processes. Epsilon is then that of a user with all rows: users are drawn, and of each one row, at random;
            batches from elsewhere are refused. A ledger that is created here calls the unit "user", one that is given
            must not call it "example". None: each row is its own unit.
        secure: the opposite of insecure; give one of the two.

    Raises:
        ConfigError: an invalid value; parameters and optimizer do not match.
        ShapeError: groups are neither N integers nor N strings.
        UnsupportedCase: a layer whose per-example gradients cannot be exact, a wrapped model.
        BudgetExceeded: the target cannot be reached with what the ledger holds.
        MissingDependency: dp-accounting is not installed, which target_epsilon needs.
    """
    processes, settings = Processes(), dict[str, object]()
    with processes.agreed(settings, _HIDDEN):
        if secure is not None and insecure:
            raise ConfigError(f"give either insecure or secure, its opposite; got {insecure!r} and {secure!r}")
        if not isinstance(secure, bool | None):
            raise ConfigError(f"secure must be True or False, got {secure!r}")
        arguments = _TrainingArguments(
            noise_multiplier, target_epsilon, steps, delta, max_grad_norm, sample_rate, expected_batch_size, microbatch,
            loss_reduction, clipping, insecure or secure is False, ledger, groups,
        )  # fmt: skip
        dimensions = _require_match(model, optimizer)
        if processes.size > 1:
            settings |= arguments.agreed() | _agreed(model, optimizer)
    return _attached(model, optimizer, arguments, processes, dimensions)


def _attached(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: _TrainingArguments, processes: Processes,
    dimensions: int,
) -> PrivateTraining:  # fmt: skip
    """Open the ledger, find the noise, and attach clipper and optimizer: all of it or nothing."""
    ledger, units = arguments.ledger, arguments.units
    with contextlib.ExitStack() as undo:
        opened: list[PrivacyLedger] = []

        def begin() -> tuple[float, str]:
            """Open the ledger and find the noise, on rank 0."""
            opened.append(_opened(ledger, units.name, arguments.budget))
            if opened[0] is not ledger:
                undo.callback(opened[0].close)
            if (known := arguments.noise_multiplier) is not None:
                return known, opened[0].run_id
            assert arguments.budget is not None and arguments.steps is not None  # noqa: PT018  for the type checker
            unit = NoisySum(make_source(insecure=arguments.insecure), 1.0, dimensions).plan(arguments.sensitivity)
            charged = 2 * unit.delta  # twice: the count of adaptive clipping has noise of its own
            noise = least_noise(arguments.budget, arguments.sample_rate, arguments.steps, opened[0], charged)
            return noise, opened[0].run_id

        noise, run_id = processes.on_first(begin)
        book = opened[0] if opened else _opened(ledger if isinstance(ledger, PrivacyLedger) else None, units.name, None)
        owned = book is not ledger
        if owned:
            book.run_id = run_id  # of all processes: they take the same steps
        clipper = PerExampleClipper(
            model, max_grad_norm=arguments.max_grad_norm, loss_reduction=arguments.loss_reduction,
            clipping="per_layer" if arguments.clipping == "per_layer" else "flat",
        )  # fmt: skip
        undo.callback(clipper.detach)
        processes.from_first_([tensor.data for tensor in (*model.parameters(), *model.buffers())])
        held, own = book.budget, arguments.budget
        if own is not None and held is not None and held.delta == own.delta and held.epsilon <= own.epsilon:
            own = None  # the ledger's is as tight
        source, adaptive = make_source(insecure=arguments.insecure), arguments.adaptive
        private = PrivateOptimizer(
            optimizer, clipper, NoisySum(source, noise, dimensions), book,
            processes=processes, budget=own, grouped=units.groups is not None,
            sample_rate=arguments.sample_rate, expected_batch_size=arguments.expected_batch_size,
            adaptive=None if adaptive is None else AdaptiveNorm(adaptive, source, noise),
        )  # fmt: skip
        undo.callback(private.detach)
        processes.on_first(lambda: book.describe(delta=arguments.delta))
        if not processes.first:
            book.describe(delta=arguments.delta)
        training = PrivateTraining(model, private, arguments, owns_ledger=owned)
        undo.pop_all()
    _private.add(model)
    return training


# --- arguments -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(slots=True)
class _TrainingArguments:
    """The arguments of `make_private`, checked; `budget` is the target, `adaptive` the settings of that clipping."""

    noise_multiplier: float | None
    target_epsilon: float | None
    steps: int | None
    delta: float
    max_grad_norm: float | Mapping[str, float]
    sample_rate: float
    expected_batch_size: float | None
    microbatch: int | None
    loss_reduction: Literal["mean", "sum"]
    clipping: Clipping | AdaptiveClipping
    insecure: bool
    ledger: LedgerLike
    groups: dataclasses.InitVar[Any]
    sensitivity: float = dataclasses.field(init=False)
    budget: Budget | None = dataclasses.field(init=False)
    adaptive: AdaptiveClipping | None = dataclasses.field(init=False)
    units: sampling.Units = dataclasses.field(init=False)

    def __post_init__(self, groups: Any) -> None:
        noise, target = self.noise_multiplier, self.target_epsilon
        if (noise is None) == (target is None):
            values = f"got noise_multiplier={noise!r} and target_epsilon={target!r}"
            raise ConfigError(f"give either noise_multiplier or target_epsilon (with steps); {values}")
        if target is not None:
            check_number("target_epsilon", target)
            if self.steps is None:
                raise ConfigError("target_epsilon needs the planned number of steps: give steps")
        for name, value in (("steps", self.steps), ("microbatch", self.microbatch)):
            if value is not None:
                check_whole(name, value, 1)
        check_number("delta", self.delta, most=0.5)
        norms = self.max_grad_norm if isinstance(self.max_grad_norm, Mapping) else {"max_grad_norm": self.max_grad_norm}
        bounds = [check_number(name, value) for name, value in norms.items()]
        if not bounds:
            raise ConfigError("max_grad_norm names no layer")
        for bound in bounds:
            require_norm(bound, self.max_grad_norm)
        if self.expected_batch_size is not None:
            check_number("expected_batch_size", self.expected_batch_size)
        if noise is not None:
            self.noise_multiplier = check_number("noise_multiplier", noise, open_below=False)
        self.sample_rate = check_number("sample_rate", self.sample_rate, most=1.0)
        self.sensitivity = math.hypot(*bounds)
        self.budget = None if target is None else Budget(epsilon=target, delta=self.delta)
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction must be mean or sum, got {self.loss_reduction!r}")
        chosen = AdaptiveClipping() if self.clipping == "adaptive" else self.clipping
        self.adaptive = chosen if isinstance(chosen, AdaptiveClipping) else None
        if self.adaptive is None and chosen not in ("flat", "per_layer"):
            raise ConfigError(f"clipping must be flat, per_layer, adaptive or an AdaptiveClipping, got {chosen!r}")
        if self.adaptive is not None and isinstance(self.max_grad_norm, Mapping):
            raise ConfigError(f"adaptive clipping starts from one max_grad_norm, got {self.max_grad_norm!r}")
        make_source(insecure=self.insecure)  # refuses what is not True or False
        self.units = sampling.Units.of(groups)
        if isinstance(self.ledger, PrivacyLedger):
            if self.units.groups is not None:
                sampling.require_named(self.ledger)
            require_clipped_unit(self.ledger)
        elif self.ledger is not None:
            ledger_path(self.ledger)

    def agreed(self) -> dict[str, object]:
        """Return what all processes must be given: ledger and microbatch may differ."""
        found: dict[str, object] = {name: as_number(getattr(self, name)) for name in _AGREED}
        found |= {"clipping": self.adaptive or self.clipping, "loss_reduction": self.loss_reduction}
        return found | {"insecure": self.insecure, "groups": self.units.digest}


def _require_match(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Check model and optimizer before anything is attached; return the number of trained values."""
    if isinstance(model, nn.Module) and model in _private:
        raise ConfigError("the model is private already: detach() the PrivateTraining first")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _require_unwrapped(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, PrivateOptimizer):
        raise ConfigError("the optimizer is private already: detach() the PrivateTraining first")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedCase("LBFGS evaluates the loss several times a step: take another optimizer")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(held):
        if id(parameter) not in names:
            raise ConfigError(
                f"parameter {position} of the optimizer, {tuple(parameter.shape)}, is not the model's: it would be "
                "updated by a gradient that is not clipped"
            )
    for key in trained.keys() - {id(parameter) for parameter in held}:
        raise ConfigError(
            f"{names[key]} requires a gradient and is not in the optimizer: freeze it by requires_grad_(False), or "
            "add it"
        )
    for key, parameter in trained.items():
        require_float32(names[key], parameter)
    if not trained:
        raise ConfigError(f"{type(model).__name__} has no parameter that requires a gradient")
    return sum(parameter.numel() for parameter in trained.values())


_AGREED = (
    "noise_multiplier", "target_epsilon", "steps", "delta", "max_grad_norm", "sample_rate", "expected_batch_size",
)  # fmt: skip
_HIDDEN = {"groups": "groups must be those of all rows, the same in each process: a unit would be in two shares"}


def _agreed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the settings of layers, precision and optimizer that processes which train together must share."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def kept(value: Any) -> object:
        return (value.item() if value.numel() == 1 else tuple(value.shape)) if isinstance(value, Tensor) else value

    state = {
        names[id(parameter)]: {name: kept(value) for name, value in sorted(each.items())}
        for parameter, each in optimizer.state.items()
    }
    return {
        "layers": [(name, type(module).__name__) for name, module in model.named_modules()],
        "parameters": [(name, tuple(each.shape), each.requires_grad) for name, each in model.named_parameters()],
        "dtypes": sorted({str(each.dtype) for each in model.parameters()}),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        **settings_of(optimizer),
        "optimizer's parameters": [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups],
        "optimizer's state": dict(sorted(state.items())),
    }


def _opened(ledger: LedgerLike, unit: str, budget: Budget | None) -> PrivacyLedger:
    return ledger if isinstance(ledger, PrivacyLedger) else PrivacyLedger(ledger, unit=unit, budget=budget)


def _require_unwrapped(model: nn.Module) -> None:
    """Raise UnsupportedCase if a model is a DistributedDataParallel or DataParallel, or is called by one."""
    wrapper = model if isinstance(model, _WRAPPERS) else getattr(_WRAPPERS[0], "_active_ddp_module", None)
    if wrapper is None and not getattr(model, "_is_replica", False):
        return
    name = "DataParallel" if wrapper is None else type(wrapper).__name__
    raise UnsupportedCase(
        f"{name} adds gradients up before they are clipped: give its module to make_private, and call that; the "
        "private step sums over the processes of torch.distributed itself"
    )


# `PrivacyEngine`: the interface of Opacus over `make_private`, for programs that were written for Opacus

_METHODS = {"prv": "pld", "pld": "pld", "rdp": "rdp"}
_FIXED = {
    "poisson_sampling": (True, "the accountant's epsilon is that of Poisson sampling"),
    "batch_first": (True, "an example is an entry of dimension 0"),
    "noise_generator": (None, "noise comes from the system's entropy, and is never repeated"),
    "grad_sample_mode": ("hooks", "norms are computed in the cheaper way for each layer, and any loss is taken"),
}  # Options of Opacus that have one value here, and why


class PoissonLoader:
    """Poisson draws from a DataLoader's data, as many as its batches; an empty one is a row that adds nothing."""

    def __init__(self, loader: DataLoader[Any], private: PrivateTraining) -> None:
        self.dataset, self.batch_size, self.private = loader.dataset, loader.batch_size, private
        self._length, self._rows = len(loader), _Rows(loader.dataset, loader.collate_fn)

    def __repr__(self) -> str:
        return f"PoissonLoader({len(self._rows)} rows, {self._length} draws, {self.private!r})"

    @property
    def sample_rate(self) -> float:
        """The probability of each row to be in a draw."""
        return self.private.sample_rate

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for batch in self.private.batches(self._rows, steps=self._length):
            yield batch.tensors[0] if self._rows.bare else batch.tensors


class _Rows:
    """A data set's rows by index tensor, as a DataLoader collates them; `bare` if that is a tensor."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate, self.bare = dataset, collate, False
        warn_of_repeats(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Tensor) -> Any:
        if isinstance(self._dataset, TensorDataset) and self._collate is default_collate:
            return [tensor[index.to(tensor.device)] for tensor in self._dataset.tensors]
        read = getattr(self._dataset, "__getitems__", None)
        found = self._collate([self._dataset[i] for i in index.tolist()] if read is None else read(index.tolist()))
        self.bare = isinstance(found, Tensor)
        return found


class PrivacyEngine:
    """Makes a model, its optimizer and its DataLoader private by the functions that Opacus' class of the name has.

    Args:
        accountant: "prv" or "pld", privacy loss distributions, or "rdp". "gdp", which may underestimate epsilon, is
            refused.
        secure_mode: accepted as Opacus has it; the noise is always cryptographic.
        ledger: a PrivacyLedger or its file, of all trainings of this engine; None: in memory.

    Attributes:
        ledger: what was spent.
        accountant: the engine itself, which has `get_epsilon`.

    Raises:
        ConfigError: an unknown accountant, or an error of PrivacyLedger.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = True, ledger: LedgerLike = None) -> None:
        if accountant not in _METHODS:
            raise ConfigError(f"accountant must be one of {', '.join(_METHODS)}, got {accountant!r}")
        self._method, self.secure_mode = _METHODS[accountant], secure_mode
        self.ledger = ledger if isinstance(ledger, PrivacyLedger) else PrivacyLedger(ledger)

    def __repr__(self) -> str:
        return f"PrivacyEngine(accountant={self._method!r}, {self.ledger!r})"

    @property
    def accountant(self) -> PrivacyEngine:
        """The engine itself, which has `get_epsilon`."""
        return self

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon at delta of all steps so far."""
        return self.ledger.epsilon(delta, method=self._method)

    def make_private(
        self, *, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any], noise_multiplier: float,
        max_grad_norm: float, delta: float = DEFAULT_DELTA, **options: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:  # fmt: skip
        """Return the module, which is not wrapped, its private optimizer, and Poisson draws of the loader's data set.

        Args:
            module, optimizer, noise_multiplier, max_grad_norm: of `make_private`.
            data_loader: its data set, length and collate_fn are used; the sampling rate is one over its length.
            delta: of the ledger's statement.
            options: others of Opacus or of `make_private`: loss_reduction, clipping, microbatch, groups.

        Raises:
            UnsupportedCase: an option that would void the guarantee, a sampler or batch_sampler of other rows than
                the data set's or with weights, a data set that has no length.
            ConfigError, ShapeError, UnsupportedCase: of `make_private`.
        """
        return self._private(
            module, optimizer, data_loader, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, delta=delta,
            **options,
        )  # fmt: skip

    def make_private_with_epsilon(
        self, *, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any], target_epsilon: float,
        target_delta: float, epochs: int, max_grad_norm: float, **options: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:  # fmt: skip
        """Do as `make_private` does, with the least noise for an epsilon after so many epochs.

        The step that would pass the target raises BudgetExceeded.

        Raises:
            ConfigError: the accountant is "rdp", by which the same noise has a larger epsilon.
            BudgetExceeded, UnsupportedCase, ConfigError, ShapeError: of `make_private`.
        """
        if self._method != "pld":
            raise ConfigError("the noise for a target is found by privacy loss distributions: PrivacyEngine() has them")
        return self._private(
            module, optimizer, data_loader, target_epsilon=target_epsilon, delta=target_delta,
            steps=check_whole("epochs", epochs, 1) * len(data_loader), max_grad_norm=max_grad_norm, **options,
        )  # fmt: skip

    def _private(
        self, module: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], **options: Any
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:
        for name, (value, reason) in _FIXED.items():
            if (given := options.pop(name, value)) != value:
                raise UnsupportedCase(f"{name}={given!r}: {reason}. Leave it out")
        options.pop("criterion", None)  # of Opacus' ghost clipping
        _require_loader(loader)
        private = make_private(module, optimizer, sample_rate=1 / len(loader), ledger=self.ledger, **options)
        return private.model, private.optimizer, PoissonLoader(loader, private)


def _require_loader(loader: Any) -> None:
    """Check that Poisson draws of the data set are what a loader is meant to give: any row, each equally likely."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"data_loader must be a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or not len(loader):
        raise UnsupportedCase("the data set must have a length, above 0: each draw is from all of its rows")
    batches = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", loader.sampler)  # not the loader's, which a batch_sampler= leaves unused
    plain = type(sampler) in (RandomSampler, SequentialSampler) and type(batches) is BatchSampler
    if not plain or sampler.data_source is not loader.dataset or len(sampler) != len(loader.dataset):
        of = f" of {len(sampler)} rows" if plain else ""
        raise UnsupportedCase(
            f"the loader draws by a {type(sampler).__name__}{of} in a {type(batches).__name__}, and "
            "Poisson draws of all rows would take its place: give a DataLoader with batch_size= and shuffle=, of a "
            "torch.utils.data.Subset for some of the rows"
        )
