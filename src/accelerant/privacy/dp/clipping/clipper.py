"""PerExampleClipper: attaches to a model, receives its layers' contributions, and runs its backward passes.

The forward of modules that use parameters of their own runs for each example by itself (`Region`). A parameter is a
view of it once for each example, whose gradient is the examples'. Layers that have a rule get the whole batch. At first
the result is compared with the plain forward's: one that differs depends on other examples.
"""
# ruff: noqa: D102  PerExampleSink documents the methods of the sink

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from accelerant.errors import AccelerantError, ConfigError, ShapeError, UnsupportedCase
from accelerant.ops import _per_example
from accelerant.ops.transformer import column_sums_each
from accelerant.privacy.dp.clipping import backward_pass, launch, rules
from accelerant.privacy.dp.clipping.backward_pass import BackwardPass, Dense
from accelerant.privacy.dp.clipping.launch import wide
from accelerant.privacy.dp.clipping.layers import SECOND_PASS, expanded
from accelerant.runtime.memory.peak import modules_restored

_TOLERANCE = 1e-2  # largest difference from the results of single examples, over the largest value


@rules.register
class OwnParametersRule(rules.LayerRule):
    """Runs the forward of a module without another rule in a region, with its parameters once for each example."""

    layers, shares = (nn.Module,), True

    def __init__(self, module: nn.Module, sink: Any, plain: Any) -> None:
        super().__init__(module, sink, plain)
        self._clipper = sink
        self._holders = rules.holders(module)
        self._compared: set[bool] = set()
        self._hooks = rules.computing_hooks(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed example by example and, the first time, compared with the plain one."""
        count = self._count(args, kwargs)
        result = self._by_example(count, args, kwargs)
        mode = self.module.training
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if mode not in self._compared and count > 1 and not captured:
            self._compare(count, result, args, kwargs)
            self._compared.add(mode)
        return result

    def inside(self, region: rules.Region, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output with the region's parameters in place of its own."""
        with self._substituted(region):
            return self.plain(*args, **kwargs)

    def _count(self, args: Any, kwargs: Any) -> int:
        """Return the number of examples of the inputs; raise if they have none."""
        found = [x for x in rules.tensors_of((args, kwargs)) if x.dim()]
        batch = self.sink.batch
        if batch is None:
            batch = found[0].shape[0] if found else None
        name = type(self.module).__name__
        if batch is None or all(x.shape[0] not in (1, batch) for x in found):
            shapes = [tuple(x.shape) for x in found]
            message = f"{name}, which has parameters of its own, got {shapes or 'no tensor'}, without a first dimension"
            message += f" of {'the' if batch is None else batch} examples"
            if self.sink.runs_by_example:
                raise rules.NotForEachExample(message)
            raise ShapeError(message)
        for x in found:
            if x.requires_grad and x.shape[0] not in (1, batch):
                raise ShapeError(
                    f"{name}, which has parameters of its own, got {tuple(x.shape)} with a gradient, whose first "
                    f"dimension is not the batch of {batch} examples"
                )
        return batch

    def _by_example(self, count: int, args: Any, kwargs: Any, shared: list[Tensor] | None = None) -> Any:
        """Run the forward in a region; with `shared`, results that only parameters determine are added to it."""
        kind = type(self.module).__name__

        def leave(y: Tensor) -> Tensor:
            value = now.unwrap(y)
            if value is None:
                if shared is not None:
                    shared.append(y)
                return y
            if not y.dim():  # a loss: the clipper knows whether it is a mean
                if self.module is not self._clipper.model:
                    raise self._not_here("returns a number for each example")
                return value.mean() if self._clipper.loss_reduction == "mean" else value.sum()
            if y.dim() > 1 and y.shape[0] != 1 and y.shape[1] == 1:  # sequences come first
                return value.squeeze(2).movedim(0, 1)
            return value.flatten(0, 1)

        def enter(x: Tensor) -> Tensor:
            return now.wrap(x.unsqueeze(1)) if x.dim() and x.shape[0] == count else x  # else not of examples

        before = list(_kept(self.module))
        with rules.region(count) as now:
            inputs = rules.mapped((args, kwargs), enter)
            try:
                with contextlib.nullcontext() if shared is not None else self._substituted(now):
                    result = self.plain(*inputs[0], **inputs[1])
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError | rules.NotForEachExample):
                    raise
                raise UnsupportedCase(
                    f"{kind} has parameters of its own, and its forward cannot run for each example by itself: "
                    f"{str(error).rstrip('. ')}. Compute with layers (torch.nn), without item(), writes into other "
                    "tensors and kernels of your own; or register a LayerRule, or freeze the parameters"
                ) from error
            result = rules.mapped(result, leave)
            for _, key, value in _kept(self.module):
                if now.unwrap(value) is not None:
                    for mapping, name, kept in before:
                        mapping[name] = kept
                    raise UnsupportedCase(
                        f"{kind} keeps in {key} what it computed from the examples: return it, or leave it out"
                    )
        return result

    @contextmanager
    def _substituted(self, now: rules.Region) -> Iterator[None]:
        """Put expanded parameters in the place of those that the module uses itself."""
        kept = [(module, module._parameters) for module in self._holders]
        known: dict[int, Tensor] = {}

        def substitute(parameter: Tensor) -> Tensor:
            if not self.sink.wants(parameter):
                return parameter
            if id(parameter) not in known:
                known[id(parameter)] = now.created(lambda: expanded(parameter, self.sink, now.examples))
            return known[id(parameter)]

        names = [hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name for hook in self._hooks]
        weights = {name: self.module.__dict__[name] for name in names}
        try:
            for module, own in kept:
                module.__dict__["_parameters"] = _Substitutes(own, substitute)
            for hook in self._hooks:  # weights from the substitutes
                hook(self.module, ())
            yield
        finally:
            for module, own in kept:
                module.__dict__["_parameters"] = own
            self.module.__dict__.update(weights)

    def _not_here(self, what: str) -> UnsupportedCase:
        """Return the error for a result that only a model that runs in a region as a whole can use, or none."""
        message = (
            f"{type(self.module).__name__} has parameters of its own, and {what}: dimension 0 of its "
            "inputs and results must be that of the examples, or 1 for what all of them share, and it must not mix "
            "them (as a mean over dimension 0 does)"
        )
        return rules.NotForEachExample(message) if self.sink.runs_by_example else UnsupportedCase(message)

    def _compare(self, count: int, result: Any, args: Any, kwargs: Any) -> None:
        """Raise UnsupportedCase if the plain forward gives another result: it depends on other examples."""

        def plain() -> list[Tensor]:
            return rules.tensors_of(self._without_trace(lambda: self.plain(*args, **kwargs)))

        found, expected, again = [each.detach() for each in rules.tensors_of(result)], plain(), []
        if not _alike(found, expected):  # it may have drawn random numbers: compare without dropout
            modes = [(module, module.training) for module in self.module.modules()]
            try:
                for module, _ in modes:
                    module.training = False
                found = rules.tensors_of(self._without_trace(lambda: self._by_example(count, args, kwargs)))
                expected, again = plain(), plain()
            finally:
                for module, mode in modes:
                    module.training = mode
            if _alike(again, expected) and not _alike(found, expected):
                shapes = [tuple(each.shape) for each in expected]
                raise self._not_here(f"its result {shapes} for {count} examples is not that of each by itself")
        if any(not each.dim() for each in found):
            shared: list[Tensor] = []
            self._without_trace(lambda: self._by_example(count, args, kwargs, shared))
            if any(each.is_floating_point() and not each.dim() for each in shared):
                raise self._not_here("returns a number that all examples share")

    def _without_trace(self, call: Callable[[], Any]) -> Any:
        """Call without gradients, and leave the module as it was."""
        with torch.no_grad(), self._clipper.unannounced(), undisturbed(self.module):
            return call()


class WholeModel(OwnParametersRule):
    """Runs a model as it is until it uses a result that all examples share in a way that only a region serves."""

    _by_itself = False
    _runs_plain = False

    @property
    def runs_plain(self) -> bool:
        """Whether a forward pass has run without a region, and the model does not always need one."""
        return self._runs_plain and not self._by_itself

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output; inside a region of another module, its plain forward's."""
        if self._by_itself or rules.in_region():
            return super().forward(*args, **kwargs)
        sink, before = self._clipper, self._clipper.inputs
        sink.inputs, sink.shared, cause = (args, kwargs), False, None
        try:
            with sink.unannounced(on_error=True):
                result = self.plain(*args, **kwargs)
            self._runs_plain = True
            return result
        except rules.NotForEachExample as error:
            if sink.batch is None:
                raise
            once = error.once
        except (RuntimeError, ValueError, IndexError) as error:
            if not sink.shared or isinstance(error, AccelerantError | torch.OutOfMemoryError):
                raise
            once, cause = False, error
        finally:
            sink.inputs = before
        try:
            result = super().forward(*args, **kwargs)
        except UnsupportedCase as error:
            if cause is None:
                raise
            raise UnsupportedCase(
                f"a layer got an input with 1 in its first dimension, as what all examples share, and its result has "
                f"one entry for each of them; then the model raised: {str(cause).rstrip('. ')}. By itself for each "
                f"example it cannot run, either: {error}"
            ) from cause
        self._by_itself = not once
        return result


def attach_whole(model: nn.Module, sink: Any, undo: ExitStack) -> None:
    """Let a model run for each example by itself if it must."""
    whole = WholeModel(model, sink, model.forward)
    rules.replace_methods(model, {"forward": whole.forward}, undo, compiled=lambda: whole.runs_plain)


class _Substitutes(dict[str, Any]):
    """A module's dictionary of parameters, of which each that is read by name is substituted."""

    def __init__(self, own: Mapping[str, Any], substitute: Callable[[Tensor], Tensor]) -> None:
        super().__init__(own)
        self._substitute = substitute

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value if value is None else self._substitute(value)


def _kept(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the buffers and other tensors that a module and those in it keep: the mapping, name and value of each."""
    for each in module.modules():
        for mapping in (each._buffers, each.__dict__):
            for key, value in list(mapping.items()):
                if isinstance(value, Tensor):
                    yield mapping, key, value


def _alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether two results are the same but for rounding."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    for one, two in zip(found, expected, strict=True):
        if one.numel() and not torch.equal(one, two):
            a, b = one.double(), two.double()
            largest = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 1.0
            if not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True):
                return False
    return True


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Restore random generators, and the modules' attributes, lists, mappings, sets and buffers, at the end."""
    plain = [
        each
        for module in model.modules()
        for each in vars(module).values()
        if isinstance(each, Tensor) and each.is_leaf and not each.requires_grad
    ]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in (*model.buffers(), *plain)]
    devices = {param.get_device() for param in model.parameters() if param.is_cuda}
    try:
        with modules_restored(model), torch.random.fork_rng(list(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


# --- the clipper -----------------------------------------------------------------------------------------------------

LEAST_NORM, LARGEST_NORM = 1e-10, 1e30  # bounds of max_grad_norm, of one layer too (see launch.unresolved)


class PerExampleClipper:
    """Makes backward passes of a model leave sums of clipped per-example gradients.

    `loss.backward()` adds sum over i of c_i g_i to each parameter's `.grad`, with g_i the gradient of example i's own
    loss and c_i = min(1, C / ||g_i||): no noise, no division. Several backward passes add up. An example whose norm is
    not finite has c_i = 0 and is counted.

    Args:
        model: of supported layers; see the package. Its parameters that require gradients now are clipped.
        max_grad_norm: C, 1e-10 to 1e30. For "per_layer": each layer gets C / sqrt(layers); or a mapping from names of
            layers (as in named_modules) to their bounds.
        clipping: "flat": by the norm over all parameters. "per_layer": each layer by its own, and its contributions are
            freed as soon as it is done.
        loss_reduction: "mean": the loss is (1 / B) sum of the examples' losses; "sum": their sum.
        norms: "ghost" or "instantiate" for all layers with the choice; "auto": whichever costs less (backward_pass.py).

    Attributes:
        mask: (B,) bool, which rows of a padded batch count; read at the next backward pass. None: all.
        loss_scale: factor of the loss (a GradScaler's scale); the gradients are left without it.
        norms: (B,) ||g_i|| after each backward pass, or just above; None before the first.
        factors: (B,) c_i; for "per_layer" the smallest of the layers'.
        layer_norms: by layer, for "per_layer" (B,) each; for "flat" one entry, under "".
        nonfinite: how many examples were left out for norms that were not finite, a scalar on the device.
        on_labels: called with the labels of a loss that a model of accelerant.nn averages itself.
        on_begin: called before a backward pass changes anything; an exception ends the pass.
        on_backward: called after each finished backward pass with norms and factors.
        parameters: the clipped ones, with names.
        idealised: whether some layer's per-example gradients are not formed; known after the first pass, true for
            norms="ghost".

    Raises:
        ConfigError: an argument has no meaning.
        UnsupportedCase: lists the layers whose per-example gradients would not be exact, and what to use instead.

    The model and the loss must treat each example by itself: if they mix examples (a loss that compares them, a mean
    over a batch's unmasked tokens) there are no per-example gradients, which is not detected.

    Neighbouring data sets differ in one example added or removed; the sum's sensitivity in L2 is `sensitivity`. Sums
    accumulate in float32. Norms are upper bounds: what an example adds, with its own rounding, is within C also where
    its gradients are not formed (`idealised`) and cancel (launch.py). How it changes the rounding of the others' sum
    has no useful bound. Memory kept until the pass ends: see backward_pass.py. Not thread-safe: one backward pass at a
    time.
    """

    def __init__(
        self, model: nn.Module, *, max_grad_norm: float | Mapping[str, float],
        clipping: Literal["flat", "per_layer"] = "flat", loss_reduction: Literal["mean", "sum"] = "mean",
        norms: Literal["auto", "ghost", "instantiate"] = "auto",
    ) -> None:  # fmt: skip
        if clipping not in ("flat", "per_layer"):
            raise ConfigError(f"clipping must be 'flat' or 'per_layer', got {clipping!r}")
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        if norms not in ("auto", "ghost", "instantiate"):
            raise ConfigError(f"norms must be one of auto, ghost, instantiate, got {norms!r}")
        self.model, self.loss_reduction = model, loss_reduction
        self.mask: Tensor | None = None
        self.loss_scale: float | Tensor = 1.0
        self._norms: Tensor | None = None
        self._factors: Tensor | None = None
        self._layer_norms: dict[str, Tensor] = {}
        self._norms_were_read = False
        self.nonfinite: Tensor | None = None
        self.on_begin: Callable[[], object] | None = None
        self.on_labels: Callable[[Tensor], object] | None = None
        self.on_backward: Callable[[Tensor, Tensor], object] | None = None
        self.idealised = norms == "ghost"
        self.examples: int | None = None  # see PerExampleSink
        self._clipping = clipping
        self._pass: BackwardPass | None = None
        self._ignored: int | None = None
        self.shared = False  # a layer's input with 1 in its first dimension was taken for that of all examples
        self.inputs: Any = None  # of a running model that can be run again for each example by itself
        self._calls = 0  # nested calls of the model that have not returned
        self._expected: dict[int, int] = {}  # contributions of the next pass, by parameter
        self._announced: dict[int, int] = {}  # those that no pass has brought yet
        for name, parameter in model.named_parameters():
            if _per_example.sink_of(parameter) is not None:
                raise ConfigError(f"{name} is clipped already: detach() the other clipper first")
        survey = rules.survey(model)
        self.parameters: list[tuple[str, nn.Parameter]] = survey.parameters
        self._frozen = survey.frozen
        names = {id(parameter): name for name, parameter in survey.parameters}
        self._plan = backward_pass.ClippingSettings(
            names, _groups(survey.parameters, clipping), norms, loss_reduction == "mean"
        )
        self.set_bounds(max_grad_norm)
        with ExitStack() as undo:
            self._attach(survey, undo)
            self._undo = undo.pop_all()

    def __repr__(self) -> str:
        return (
            f"PerExampleClipper({type(self.model).__name__}, max_grad_norm={self.max_grad_norm}, "
            f"clipping={self._clipping!r}, loss_reduction={self.loss_reduction!r})"
        )

    # --- norms and settings ------------------------------------------------------------------------------------------

    @property
    def norms(self) -> Tensor | None:
        """The norm of each example's gradient in the last backward pass."""
        self._norms_were_read = True
        return self._norms

    @property
    def factors(self) -> Tensor | None:
        """The factors that clipped them."""
        self._norms_were_read = True
        return self._factors

    @property
    def layer_norms(self) -> dict[str, Tensor]:
        """The norms by layer."""
        self._norms_were_read = True
        return self._layer_norms

    @property
    def max_grad_norm(self) -> float | Mapping[str, float]:
        """C, or the bound of each layer; may be set between steps."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Mapping[str, float]) -> None:
        if self._norms_were_read and self.on_backward is not None:
            warnings.warn(
                "max_grad_norm is set in a private training after norms or factors of examples were read: a bound that "
                "follows them reveals them, and no ledger counts that. clipping='adaptive' follows a noisy quantile; "
                "other bounds must not depend on the data",
                UserWarning,
                stacklevel=2,
            )
        self.set_bounds(value)

    def set_bounds(self, value: float | Mapping[str, float]) -> None:
        """Set max_grad_norm to a value that does not depend on the examples' norms, or only by a noisy quantile."""
        groups = self._plan.groups
        if isinstance(value, Mapping):
            if self._clipping == "flat":
                raise ConfigError('max_grad_norm by layer is for clipping="per_layer"; flat clipping takes one number')
            names = {group.name for group in groups}
            if set(value) != names:
                missing, unknown = sorted(names - set(value)), sorted(set(value) - names)
                raise ConfigError(f"max_grad_norm must name each layer once: missing {missing}, unknown {unknown}")
            bounds = [float(value[group.name]) for group in groups]
        else:
            bounds = [float(value) / math.sqrt(len(groups) or 1)] * len(groups)
        for bound in bounds:
            require_norm(bound, value)
        for group, bound in zip(groups, bounds, strict=True):
            group.bound = bound
            group.limit.fill_(bound)
        self._max_grad_norm = value if isinstance(value, Mapping) else float(value)

    @property
    def sensitivity(self) -> float:
        """The most that one example moves the sum, in L2: C, or sqrt(sum C_l^2) over layers."""
        if isinstance(self._max_grad_norm, Mapping):
            return math.sqrt(sum(group.bound**2 for group in self._plan.groups))
        return float(self._max_grad_norm)

    def keep_sums(self, sums: dict[int, Tensor] | None) -> None:
        """Add the sums to these tensors, by their parameter's identity, from now on; None: to `.grad`."""
        self._plan.sums = sums

    # --- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self, survey: rules.Survey, undo: ExitStack) -> None:
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self.model:  # not a copy of it
                self._calls += 1
                self.begin(*args, *kwargs.values())

        def after(module: nn.Module, args: Any, result: Any) -> None:
            if module is self.model:
                self._calls -= 1

        model, own = self.model, [parameter for _, parameter in survey.parameters]
        _per_example.attach(self, own)
        undo.callback(_per_example.detach, own)
        rules.hide_marked(model, undo)
        undo.callback(model.register_forward_pre_hook(rules.mark(before), with_kwargs=True).remove)
        undo.callback(model.register_forward_hook(rules.mark(after), always_call=True).remove)
        for name, module in survey.frozen:
            rules.watch_frozen(name, module, undo)
        for name, parameter in survey.parameters:
            undo.callback(parameter.register_hook(partial(_refuse_gradient, name)).remove)
            if parameter._post_accumulate_grad_hooks:
                raise UnsupportedCase(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which would run before the noise is "
                    "added: remove it, and call step() of the private optimizer"
                )
        undo.callback(self._return_hooks)
        for module, rule in survey.layers:
            rules.attach_rule(module, rule, self, undo, partial(self._require_used, module))
        for module, methods in survey.models:
            rules.replace_methods(module, methods(module, self), undo)
        shares = any(rule.shares for _, rule in survey.layers)
        if shares and "forward" not in model.__dict__ and type(model) not in rules.model_methods:
            attach_whole(model, self, undo)

    def _take_hooks(self) -> None:
        """Keep hooks of parameters' gradients from a backward pass, where autograd has no gradient for them."""
        for name, parameter in self.parameters:
            hooks = parameter._backward_hooks or {}
            for key, hook in hooks.items():
                if isinstance(hook, _Later) or getattr(hook, "func", None) is _refuse_gradient:
                    continue
                if self._plan.sums is None:
                    raise UnsupportedCase(
                        f"{name} has a hook (register_hook), which would change the sum of clipped gradients: "
                        "make_private runs it on the noisy mean; here remove it"
                    )
                hooks[key] = _Later(hook)

    def _return_hooks(self) -> None:
        for _, parameter in self.parameters:
            hooks = parameter._backward_hooks or {}
            for key, hook in hooks.items():
                if isinstance(hook, _Later):
                    hooks[key] = hook.hook

    def run_hooks(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return what the user's hooks of a parameter (Tensor.register_hook) make of its noisy gradient."""
        for hook in list((parameter._backward_hooks or {}).values()):
            if getattr(hook, "func", None) is not _refuse_gradient:
                result = (hook.hook if isinstance(hook, _Later) else hook)(gradient)
                gradient = gradient if result is None else result
        return gradient

    def detach(self) -> None:
        """Restore the model: backward passes make ordinary gradients. May be called again."""
        self._undo.close()
        self._pass, self.examples, self._calls = None, None, 0
        self._expected.clear()
        self._announced.clear()

    def _require_used(self, module: nn.Module) -> None:
        """Raise UnsupportedCase if the forward pass of a layer did not use one of its own parameters as it is."""
        for parameter in module.parameters(recurse=False):
            if self.wants(parameter) and id(parameter) not in self._announced:
                name, kind = self._plan.names[id(parameter)], type(module).__name__
                raise UnsupportedCase(
                    f"{name} is not used by the forward pass of its {kind}, or only to compute another tensor: it "
                    "would get noise and no gradient. Register a LayerRule, compute with supported layers, or freeze it"
                )

    def require_frozen(self) -> None:
        """Raise UnsupportedCase if a frozen BatchNorm is in train mode, or lost its running statistics."""
        for name, module in self._frozen:
            rules.require_frozen(name, module)

    def begin(self, *inputs: Any) -> None:
        """Record the number of examples of a forward pass that records gradients: the first dimension of its input.

        The model's `__call__` does it; a caller of a part of the model must call this first.
        """
        if torch.is_grad_enabled():
            self.examples = batch_size(inputs)

    # --- the sink (accelerant.ops._per_example.PerExampleSink) -------------------------------------------------------

    @property
    def batch(self) -> int | None:
        return self.examples if self._calls else None

    @property
    def runs_by_example(self) -> bool:
        return self.inputs is not None

    def is_input(self, x: Tensor) -> bool:
        mine = x.untyped_storage().data_ptr()
        strided = [each for each in rules.tensors_of(self.inputs) if each.layout == torch.strided]
        return any(each.untyped_storage().data_ptr() == mine for each in strided)

    def expect(self, *parameters: Tensor | None) -> None:
        for parameter in parameters:
            if parameter is not None and self.wants(parameter):
                for counts in (self._expected, self._announced):
                    counts[id(parameter)] = counts.get(id(parameter), 0) + 1

    @contextmanager
    def unannounced(self, *, on_error: bool = False) -> Iterator[None]:
        """Forget what was announced within, of a forward pass that has no backward pass; or only if it fails."""
        kept, failed = (dict(self._expected), dict(self._announced)), True
        try:
            yield
            failed = False
        finally:
            if failed or not on_error:
                self._expected, self._announced = kept

    def wants(self, parameter: Tensor | None) -> bool:
        return parameter is not None and parameter.requires_grad and id(parameter) in self._plan.names

    def linear(self, weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor, examples: int) -> None:
        if weight is not None and self.wants(weight):
            self.contribute(weight, backward_pass.Rows(_by_example(x, examples), _by_example(dy, examples)), examples)
        self.columns(bias, dy, examples)

    def embedding(
        self, weight: Tensor, dy: Tensor, tokens: Tensor, examples: int, padding_idx: int | None = None,
        distinct: bool = False,
    ) -> None:  # fmt: skip
        if not self.wants(weight):
            return
        g = _by_example(dy, examples)
        shared = tokens if examples else tokens[:0]  # positions are those of every example
        tokens = shared.reshape(-1, g.shape[1]).long().expand(examples, -1)
        if padding_idx is not None:
            g = g.masked_fill((tokens == padding_idx).unsqueeze(2), 0)
        self.contribute(weight, backward_pass.Lookup(tokens, g, weight.shape[0], distinct), examples)

    def norm(
        self, weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor, statistics: Tensor, examples: int
    ) -> None:
        if weight is not None and self.wants(weight):
            rstd = statistics[:, -1:]
            h = x * rstd if statistics.shape[1] == 1 else torch.sub(x, statistics[:, :1]).mul_(rstd)
            self.gradients(weight, _by_example(h.mul_(dy), examples).sum(1))
        self.columns(bias, dy, examples)

    def columns(self, bias: Tensor | None, dy: Tensor, examples: int) -> None:
        if bias is not None and self.wants(bias):
            if dy.is_cuda and examples:
                self.gradients(bias, column_sums_each(dy, examples))
            else:
                self.gradients(bias, _by_example(dy, examples).sum(1, dtype=wide(dy.dtype)))

    def gradients(
        self, parameter: Tensor, each: Tensor, squares: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        known = None if squares is None else squares[:, None]
        if each.shape[1:] != parameter.shape:  # of a norm over several dimensions: columns
            each = each.reshape(each.shape[0], *parameter.shape)
        self.contribute(parameter, Dense(each, known, factor), each.shape[0])

    def form(self, a: Tensor, g: Tensor, out: Tensor) -> Tensor:
        return launch.form(a, g, out)[1].sum(1)

    def contribute(self, parameter: Tensor, contribution: backward_pass.GradientContribution, examples: int) -> None:
        """Take a contribution of any kind to a parameter's per-example gradients."""
        if not self.wants(parameter):
            return
        task = torch._C._current_graph_task_id()
        if task == self._ignored:
            return
        now = self._pass
        if now is None or now.task != task:
            if not backward_pass.makes_gradient(parameter):
                self._ignored = task
                return
            self._ignored = None
            self._take_hooks()
            if self.on_begin is not None:
                self.on_begin()
            now = self._pass = BackwardPass(task, self._plan, self._expected, self.mask, self.loss_scale)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        left = self._announced.get(id(parameter), 0)
        if not left:  # forward passes that were dropped leave some over: the layers' functions check visits, too
            raise UnsupportedCase(SECOND_PASS)
        self._announced[id(parameter)] = left - 1
        now.add(parameter, contribution, examples)

    # --- trial passes ------------------------------------------------------------------------------------------------

    def trial(
        self, forward: Callable[[], Any], mask: Tensor | None = None, index: Tensor | None = None, rows: int = 0
    ) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Run a pass with random output gradients that leaves no trace; return norms (B,) and sums by layer.

        The sums are over the examples of the mask. Example i of a result with a row, or several, for each of an index
        gets the output gradient of example index[i] of a batch of so many rows.
        """
        kept, layers, sums = dict(vars(self)), _groups(self.parameters, "per_layer"), dict[int, Tensor]()
        for layer in layers:
            layer.limit.fill_(math.inf)
        vars(self).update(
            mask=mask, loss_scale=1.0, nonfinite=None, _layer_norms={}, on_begin=None, on_backward=None,
            _plan=replace(self._plan, groups=layers, sums=sums), _pass=None, _expected={}, _announced={},
        )  # fmt: skip
        try:
            results = [each for each in rules.tensors_of(forward()) if each.requires_grad]
            with torch.autocast(self.parameters[0][1].device.type, enabled=False):
                if results:
                    torch.autograd.backward(results, [_random_like(each, index, rows) for each in results])
            names = {layer.name: layer.parameters.values() for layer in layers}
            return self._layer_norms, {
                name: [sums[id(each)] for each in names[name] if id(each) in sums] for name in self._layer_norms
            }
        finally:
            vars(self).update(kept)

    # --- the end of a pass -------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        done, self._pass = self._pass, None
        self._expected.clear()
        if done is None:
            return
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._plan.names:
                raise UnsupportedCase(
                    f"{name} takes gradients, but did not, or was not there, when the clipper was attached: nothing "
                    "clips them. detach() it and make another"
                )
        done.finish()
        if not done.clipped:
            return
        self._layer_norms = {name: norms for name, (norms, _) in done.clipped.items()}
        (self._norms, self._factors), *others = done.clipped.values()
        if others:
            each, factors = map(torch.stack, zip(*done.clipped.values(), strict=True))
            self._norms = torch.linalg.vector_norm(each, dim=0, dtype=torch.float64).to(each.dtype)
            self._factors = factors.amin(0)
        self.idealised = self.idealised or not done.formed
        if done.nonfinite is not None:
            self.nonfinite = done.nonfinite if self.nonfinite is None else self.nonfinite.add_(done.nonfinite)
        if self.on_backward is not None:
            self.on_backward(self._norms, self._factors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a copy of a parameter in another process has no sink."""
        return type(None), ()


def require_norm(bound: float, given: object) -> None:
    """Raise ConfigError for a clipping norm, of one layer or of all, beyond LEAST_NORM and LARGEST_NORM."""
    if not (bound > 0 and math.isfinite(bound)):
        raise ConfigError(f"max_grad_norm must be above 0 and finite, got {given!r}")
    if not LEAST_NORM <= bound <= LARGEST_NORM:
        raise ConfigError(
            f"max_grad_norm must be {LEAST_NORM:g} to {LARGEST_NORM:g}, for each layer too, got {given!r}: squares of "
            "such norms leave the range of float32. Multiply the loss by a constant, and max_grad_norm with it"
        )


def _by_example(rows: Tensor, examples: int) -> Tensor:
    """View (examples T, N) as (examples, T, N)."""
    if not examples:
        return rows.reshape(0, 1, rows.shape[-1])
    if rows.shape[0] % examples:
        raise ShapeError(f"rows must be a multiple of the {examples} examples, got {rows.shape[0]}")
    return rows.view(examples, rows.shape[0] // examples, rows.shape[-1])


class _Later:
    """A user's hook of a parameter's gradient, which a backward pass leaves for the end of the step."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> None:
        return None


def _refuse_gradient(name: str, gradient: Tensor | None) -> None:
    """Refuse a gradient of a parameter that autograd computed itself; the layers' functions return None."""
    if gradient is not None:
        raise UnsupportedCase(
            f"{name} is used outside of its layer's forward: that part's per-example gradients are not known. Let the "
            "model call the layer, or freeze the parameter"
        )


def batch_size(inputs: Any) -> int | None:
    """Return the first dimension of the first tensor with dimensions in nested inputs."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else None
    items = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    return next((size for item in items if (size := batch_size(item)) is not None), None)


def _random_like(result: Tensor, index: Tensor | None, rows: int) -> Tensor:
    """Return the same random numbers for each tensor of a shape, of the rows of an index; 1 for a scalar."""
    if not result.dim():
        return torch.ones_like(result)
    shape, each = result.shape, 0
    if index is not None and len(index) and shape[0] % len(index) == 0:
        each = shape[0] // len(index)
        shape = torch.Size((rows * each, *shape[1:]))
    generator = torch.Generator(result.device).manual_seed(0)
    found = torch.randn(shape, generator=generator, dtype=result.dtype, device=result.device)
    if index is None or not each:
        return found
    return found.reshape(rows, -1)[index.to(found.device)].reshape(result.shape)


def _groups(parameters: list[tuple[str, nn.Parameter]], clipping: str) -> list[backward_pass.ClippingGroup]:
    groups: dict[str, backward_pass.ClippingGroup] = {}
    for name, parameter in parameters:
        layer = "" if clipping == "flat" else name.rpartition(".")[0]
        if layer not in groups:
            groups[layer] = backward_pass.ClippingGroup(
                layer, {}, 0.0, torch.zeros((), dtype=torch.float64, device=parameter.device)
            )
        groups[layer].parameters[id(parameter)] = parameter
    return list(groups.values())
