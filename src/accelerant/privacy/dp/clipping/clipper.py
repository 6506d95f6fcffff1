"""PerExampleClipper: attaches to a model, and owns its passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.ops import _per_example
from accelerant.ops.transformer.op import column_sums_each
from accelerant.privacy.dp.clipping import (
    attention,
    convolution,
    frozen,
    hugging_face,
    launch,
    layers,
    models,
    recurrent,
)
from accelerant.privacy.dp.clipping.contributions import Dense, Lookup, Piece, Rows
from accelerant.privacy.dp.clipping.copies import leave_out, mark
from accelerant.privacy.dp.clipping.functions import SECOND_PASS
from accelerant.privacy.dp.clipping.norms import wide
from accelerant.privacy.dp.clipping.passes import BackwardPass, Group, Plan, require_plain_backward

__all__ = ["PerExampleClipper"]

for _each in (attention, convolution, hugging_face, models, recurrent):
    _each.register()

_NORMS = ("auto", "ghost", "instantiate")


class PerExampleClipper:
    """Makes backward passes of a model leave sums of clipped per-example gradients.

    After `loss.backward()` each parameter's `.grad` has had sum over i of c_i g_i added, c_i = min(1, C / ||g_i||),
    with g_i the gradient of example i's own loss: no noise yet, nothing divided. Several backward passes add up. An
    example whose norm is not finite has c_i = 0 and is counted.

    Args:
        model: of supported layers; see the package. Its parameters that require gradients now are clipped.
        max_grad_norm: C, above 0. Of "per_layer": each layer gets C / sqrt(layers); or a mapping from names of layers
            (as named_modules has them) to their bounds.
        clipping: "flat": by the norm over all parameters. "per_layer": each layer by its own: nothing is kept longer
            than until the layer is done.
        loss_reduction: "mean": the loss is (1 / B) sum of the examples' losses; "sum": their sum.
        norms: "ghost" or "instantiate" for all layers that have the choice; "auto": what costs less (norms.py).

    Attributes:
        mask: (B,) bool, which rows of a padded batch count; read at the next backward pass. None: all.
        loss_scale: the loss was multiplied by it (a GradScaler's scale); the gradients are left without it.
        norms: (B,) ||g_i|| after each backward pass; None before the first.
        factors: (B,) c_i; of "per_layer" the smallest of the layers'.
        layer_norms: by layer, of "per_layer" (B,) each; of "flat" one entry, under "".
        nonfinite: how many examples were left out for norms that were not finite, a scalar on the device.
        on_begin: called before a backward pass leaves anything; what it raises ends the pass.
        on_backward: called after each finished backward pass with norms and factors.

    Raises:
        ConfigError: an argument has no meaning.
        UnsupportedCase: layers whose per-example gradients would not be exact, all by name, and what to use instead.

    The model and the loss must treat each example by itself: what mixes examples (a loss that compares them, a mean
    over those tokens of a batch that count) has no per-example gradients, and is not noticed.

    Neighbouring data sets differ in one example added or removed; the sum's sensitivity in L2 is `sensitivity`. Norms
    and sums accumulate in float32. Where a layer's gradients are not formed (`idealised`) rounding has no useful bound.
    Kept until the pass is over: see pieces.py. Not thread-safe: one backward pass at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_grad_norm: float | Mapping[str, float],
        clipping: Literal["flat", "per_layer"] = "flat",
        loss_reduction: Literal["mean", "sum"] = "mean",
        norms: Literal["auto", "ghost", "instantiate"] = "auto",
    ) -> None:
        if clipping not in ("flat", "per_layer"):
            raise ConfigError(f"clipping must be 'flat' or 'per_layer', got {clipping!r}")
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        if norms not in _NORMS:
            raise ConfigError(f"norms must be one of {', '.join(_NORMS)}, got {norms!r}")
        self.model = model
        self.mask: Tensor | None = None
        self.loss_scale: float | Tensor = 1.0
        self.norms: Tensor | None = None
        self.factors: Tensor | None = None
        self.layer_norms: dict[str, Tensor] = {}
        self.nonfinite: Tensor | None = None
        self.on_begin: Callable[[], object] | None = None
        self.on_backward: Callable[[Tensor, Tensor], object] | None = None
        self._clipping = clipping
        self._pass: BackwardPass | None = None
        self._ignored: int | None = None
        self._examples: int | None = None
        self._inside = 0
        self._expected: dict[int, int] = {}
        self._announced: dict[int, int] = {}
        self._removals: list[Callable[[], None]] = []
        self._idealised = norms == "ghost"
        self._frozen: list[tuple[str, nn.Module]] = []
        for name, parameter in model.named_parameters():
            if _per_example.sink_of(parameter) is not None:
                raise ConfigError(f"{name} is clipped already: detach() the other clipper first")
        found = layers.survey(model)
        self.parameters: list[tuple[str, nn.Parameter]] = found.parameters
        self._plan = Plan(
            {id(each): name for name, each in found.parameters},
            {id(each): each for _, each in found.parameters},
            _groups(found, clipping),
            norms,
            loss_reduction == "mean",
        )
        self.max_grad_norm = max_grad_norm
        self._attach(found)

    # --- settings ----------------------------------------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | Mapping[str, float]:
        """C, or the bound of each layer; may be set between steps."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Mapping[str, float]) -> None:
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
            if not (bound > 0 and math.isfinite(bound)):
                raise ConfigError(f"max_grad_norm must be above 0 and finite, got {value!r}")
        for group, bound in zip(groups, bounds, strict=True):
            group.set(bound)
        self._max_grad_norm = value if isinstance(value, Mapping) else float(value)

    @property
    def sensitivity(self) -> float:
        """How far one example moves the sum, in L2: C, or sqrt(sum C_l^2) over layers."""
        if isinstance(self._max_grad_norm, Mapping):
            return math.sqrt(sum(group.bound**2 for group in self._plan.groups))
        return float(self._max_grad_norm)

    @property
    def idealised(self) -> bool:
        """Whether some layer's per-example gradients are not formed; known after the first pass, true for "ghost"."""
        return self._idealised

    # --- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self, found: layers.Survey) -> None:
        try:
            own = [each for _, each in found.parameters]
            _per_example.attach(self, own)
            self._removals.append(lambda: _per_example.detach(own))
            self._removals.append(leave_out(self.model))
            for hook in _around(self):
                self._removals.append(hook.remove)
            self._frozen = found.frozen
            self._removals += [frozen.watch(name, module) for name, module in found.frozen]
            for name, parameter in found.parameters:
                self._removals.append(parameter.register_hook(_stray(name)).remove)
            for module, make in found.replaced:
                self._removals.append(layers.replace(module, make, self))
            for module, adapt in found.models:
                self._removals.append(layers.adapt(module, adapt, self))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give the model back as it was: backward passes make ordinary gradients. May be called again."""
        while self._removals:
            self._removals.pop()()
        self._pass, self._examples, self._inside = None, None, 0
        self._expected.clear()
        self._announced.clear()

    def require_frozen(self) -> None:
        """Check that each BatchNorm that was frozen is so still, before a pass or a step.

        Raises:
            UnsupportedCase: one is in train mode, or lost its running statistics; by name.
        """
        for name, module in self._frozen:
            frozen.require(name, module)

    def begin(self, *inputs: Any) -> None:
        """Note how many examples a forward pass is for: the first dimension of the first tensor that has one.

        Called by the model's `__call__`; to be called first by who calls a part of the model. Without gradients it does
        nothing: a pass that is under way stays what it is.
        """
        if torch.is_grad_enabled():
            self._examples = _batch(inputs)

    # --- the sink (accelerant.ops._per_example) -----------------------------------------------------------------------

    @property
    def examples(self) -> int | None:
        """Of the forward pass that runs."""
        return self._examples

    @property
    def batch(self) -> int | None:
        """Of the call of the model that is under way; None outside of one, where a layer's input says it."""
        return self._examples if self._inside else None

    def expect(self, *parameters: Tensor | None) -> None:
        """See PerExampleSink."""
        for parameter in parameters:
            if parameter is not None and self.wants(parameter):
                for counts in (self._expected, self._announced):
                    counts[id(parameter)] = counts.get(id(parameter), 0) + 1

    def wants(self, parameter: Tensor | None) -> bool:
        """See PerExampleSink."""
        return parameter is not None and parameter.requires_grad and id(parameter) in self._plan.names

    def linear(self, weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor, examples: int) -> None:
        """See PerExampleSink."""
        if weight is not None and self.wants(weight):
            self._add(weight, Rows(_by_example(x, examples), _by_example(dy, examples)), examples)
        self.columns(bias, dy, examples)

    def embedding(
        self,
        weight: Tensor,
        dy: Tensor,
        tokens: Tensor,
        examples: int,
        padding_idx: int | None = None,
        distinct: bool = False,
    ) -> None:
        """See PerExampleSink."""
        if not self.wants(weight):
            return
        g = _by_example(dy, examples)
        tokens = tokens.reshape(-1, g.shape[1]).long().expand(examples, -1)
        if padding_idx is not None:
            g = g.masked_fill((tokens == padding_idx).unsqueeze(2), 0)
        self._add(weight, Lookup(tokens, g, weight.shape[0], distinct), examples)

    def norm(
        self, weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor, statistics: Tensor, examples: int
    ) -> None:
        """See PerExampleSink."""
        if weight is not None and self.wants(weight):
            rstd = statistics[:, -1:]
            h = x * rstd if statistics.shape[1] == 1 else torch.sub(x, statistics[:, :1]).mul_(rstd)
            self.gradients(weight, _by_example(h.mul_(dy), examples).sum(1))
        self.columns(bias, dy, examples)

    def columns(self, bias: Tensor | None, dy: Tensor, examples: int) -> None:
        """See PerExampleSink."""
        if bias is not None and self.wants(bias):
            if dy.is_cuda and examples:
                self.gradients(bias, column_sums_each(dy, examples))
            else:
                self.gradients(bias, _by_example(dy, examples).sum(1, dtype=wide(dy.dtype)))

    def gradients(
        self, parameter: Tensor, each: Tensor, squares: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        """See PerExampleSink."""
        if self.wants(parameter):
            self._add(parameter, Dense(each, squares, factor), each.shape[0])

    def form(self, a: Tensor, g: Tensor, out: Tensor) -> Tensor:
        """See PerExampleSink."""
        return launch.form(a, g, out)[1]

    def piece(self, parameter: Tensor, piece: Piece, examples: int) -> None:
        """As `gradients`, of a piece made by who knows its kind."""
        if self.wants(parameter):
            self._add(parameter, piece, examples)

    # --- a pass ------------------------------------------------------------------------------------------------------

    def _add(self, parameter: Tensor, piece: Piece, examples: int) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._ignored:
            return
        now = self._pass
        if now is None or now.task != task:
            if not require_plain_backward(parameter):
                self._ignored = task
                return
            self._ignored = None
            if self.on_begin is not None:
                self.on_begin()
            now = self._pass = BackwardPass(task, self._plan, self._expected, self.mask, self.loss_scale)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        left = self._announced.get(id(parameter), 0)
        if not left:  # forward passes that were dropped leave some over: their layers' own functions look, too
            raise UnsupportedCase(SECOND_PASS)
        self._announced[id(parameter)] = left - 1
        now.add(parameter, piece, examples)

    def _finish(self) -> None:
        done, self._pass = self._pass, None
        self._expected.clear()
        if done is None:
            return
        self._require_known()
        done.finish()
        found = done.clipped
        if not found:
            return
        self.layer_norms = {name: each.norms for name, each in found.items()}
        if len(found) == 1:
            ((_, only),) = found.items()
            self.norms, self.factors = only.norms, only.factors
        else:
            self.norms = torch.stack([each.norms for each in found.values()]).square().sum(0).sqrt()
            self.factors = torch.stack([each.factors for each in found.values()]).amin(0)
        self._idealised = self._idealised or not done.formed
        if done.nonfinite is not None:
            self.nonfinite = done.nonfinite if self.nonfinite is None else self.nonfinite.add_(done.nonfinite)
        if self.on_backward is not None:
            self.on_backward(self.norms, self.factors)

    def _require_known(self) -> None:
        """Raises UnsupportedCase where a parameter got an ordinary gradient, of all examples as they are."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._plan.names:
                raise UnsupportedCase(
                    f"{name} takes gradients, but did not, or was not there, when the clipper was attached: nothing "
                    "clips them. detach() it and make another"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter that is sent elsewhere has no sink."""
        return type(None), ()


def _by_example(rows: Tensor, examples: int) -> Tensor:
    """(examples T, N) as (examples, T, N)."""
    if not examples:
        return rows.reshape(0, 1, rows.shape[-1])
    if rows.shape[0] % examples:
        raise ShapeError(f"rows must be a multiple of the {examples} examples, got {rows.shape[0]}")
    return rows.view(examples, rows.shape[0] // examples, rows.shape[-1])


def _around(clipper: PerExampleClipper) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks around the clipper's model's forward; in a copy of the model they are not."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is clipper.model:
            clipper._inside += 1
            clipper.begin(*args, *kwargs.values())

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if module is clipper.model:
            clipper._inside -= 1

    model = clipper.model
    return model.register_forward_pre_hook(mark(before), with_kwargs=True), model.register_forward_hook(
        mark(after), always_call=True
    )


def _stray(name: str) -> Callable[[Tensor], None]:
    """A hook for a gradient that autograd makes of a parameter itself."""

    def refuse(gradient: Tensor | None) -> None:
        if gradient is not None:
            raise UnsupportedCase(
                f"{name} is used outside of its layer's forward: that part's per-example gradients are not known. Let "
                "the model call the layer, or freeze the parameter"
            )

    return refuse


def _batch(inputs: Any) -> int | None:
    """The first dimension of the first tensor in there."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else None
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, (tuple, list)):
        for each in inputs:
            found = _batch(each)
            if found is not None:
                return found
    return None


def _groups(found: layers.Survey, clipping: str) -> list[Group]:
    groups: dict[str, Group] = {}
    for name, each in found.parameters:
        layer = "" if clipping == "flat" else name.rpartition(".")[0]
        if layer not in groups:
            groups[layer] = Group(layer, [], 0.0, torch.zeros((), dtype=torch.float64, device=each.device))
        groups[layer].parameters.append(id(each))
    return list(groups.values())
