"""Modules that use parameters of their own, of any kind: their forward runs for each example by itself (`Region`).

A parameter that such a forward reads is a view of it once for each example, whose gradient is the examples'. Layers
that have a rule get the whole batch. At first the result is compared with the plain forward's: one that differs depends
on other examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.privacy.dp.clipping import rules
from accelerant.privacy.dp.clipping.layers import expanded
from accelerant.runtime.memory.peak import modules_restored

_TOLERANCE = 1e-2
"""Largest difference of the plain result from that of single examples, over the largest value: rounding, or TF32."""


@rules.register
class OwnParametersRule(rules.OwnParameters):
    """Runs a module's own forward in a region, with its parameters once for each example."""

    layers = (nn.Module,)

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
    """Runs a model as it is until it uses a result that all examples share in a way that only a region serves.

    Positions are an example, `positions(arange(T))[None]`. torch.compile's model is compiled once it ran without a
    region.
    """

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
        sink.inputs = args, kwargs
        try:
            with sink.unannounced(on_error=True):
                result = self.plain(*args, **kwargs)
            self._runs_plain = True
            return result
        except rules.NotForEachExample as error:
            if sink.batch is None:
                raise
            once = error.once
        finally:
            sink.inputs = before
        result = super().forward(*args, **kwargs)
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
    if len(found) != len(expected):
        return False
    for one, two in zip(found, expected, strict=True):
        if one.shape != two.shape:
            return False
        if one.numel() and not torch.equal(one, two):
            a, b = one.double(), two.double()
            largest = b[torch.isfinite(b)].abs().max() if bool(torch.isfinite(b).any()) else 1.0
            if not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(largest), equal_nan=True):
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
