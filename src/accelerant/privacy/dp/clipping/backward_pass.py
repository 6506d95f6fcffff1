"""One backward pass: contributions are collected by parameter, and summed with each example's weight at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.privacy.dp.clipping.contributions import Contribution, Dense, Lookup, Rows, merged
from accelerant.privacy.dp.clipping.launch import Gram, bounded, margin, unresolved, wide


@dataclass(slots=True)
class Group:
    """Parameters that are clipped by one norm.

    Attributes:
        parameters: by identity, in the model's order: sums over them have the same bits in each run.
        bound: the norm that each example's gradient is clipped to.
    """

    name: str
    parameters: dict[int, torch.nn.Parameter]
    bound: float
    limit: Tensor


@dataclass(slots=True)
class ClippingPlan:
    """The settings that all passes of a clipper share.

    Attributes:
        norms: "auto", "ghost" or "instantiate".
        mean: whether the loss is the mean over examples.
        sums: the sums of clipped gradients by their parameter's identity; None: they are the parameters' .grad.
    """

    names: Mapping[int, str]
    groups: Sequence[Group]
    norms: str
    mean: bool
    sums: dict[int, Tensor] | None = None
    group_of: Mapping[int, Group] = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = {parameter: group for group in self.groups for parameter in group.parameters}


class ClippedGroup(NamedTuple):
    """Norms of a group's per-example gradients, and the factors that clipped them; (B,) each."""

    norms: Tensor
    factors: Tensor


@dataclass(slots=True)
class _Share:
    """A parameter's contributions, how many have arrived, and the terms of their squared norm once they are known."""

    contributions: list[Contribution] = field(default_factory=list)
    arrived: int = 0
    squares: Tensor | Gram | None = None


class BackwardPass:
    """Collects contributions; computes norms and adds the weighted sums to the gradients when all are there.

    Args:
        mask: (B,) bool, examples that count; None for all.

    Attributes:
        clipped: by group name, once it is summed.
        formed: whether every norm was taken of the very gradients that were summed.
        nonfinite: how many examples were left out for a norm that is not finite; set by `finish`.
    """

    def __init__(
        self, task: int, plan: ClippingPlan, expected: Mapping[int, int], mask: Tensor | None, scale: float | Tensor
    ) -> None:
        self.task = task
        self.clipped: dict[str, ClippedGroup] = {}
        self.formed = True
        self.nonfinite: Tensor | None = None
        self._examples: int | None = None
        self._left_out: Tensor | None = None
        self._plan, self._expected, self._mask, self._loss_scale = plan, dict(expected), mask, scale
        self._shares: dict[int, _Share] = {}

    def add(self, parameter: Tensor, contribution: Contribution, examples: int) -> None:
        """Take a contribution; ShapeError if it is of other examples, UnsupportedCase if its layer was clipped."""
        key, plan = id(parameter), self._plan
        if self._examples is None:
            self._examples = examples
            if self._mask is not None and self._mask.shape != (examples,):
                raise ShapeError(f"mask must be ({examples},), one for each example, got {tuple(self._mask.shape)}")
        elif self._examples != examples:
            raise ShapeError(
                f"all layers must see the same examples: {plan.names[key]} had {examples} in its first dimension, "
                f"layers after it {self._examples}"
            )
        group, by_layer = plan.group_of[key], len(plan.groups) > 1
        if group.name in self.clipped:
            raise UnsupportedCase(
                f"{plan.names[key]} got another contribution after its layer was clipped; forward passes that were "
                'dropped or recomputed do that: take clipping="flat"'
            )
        if by_layer and isinstance(contribution, Rows):
            contribution.consumed = False  # the layer's input gradient may be computed after its sum
        share = self._shares.setdefault(key, _Share())
        share.contributions.append(contribution)
        share.arrived += 1
        share.squares = None
        if share.arrived == self._expected.get(key, 0) and (by_layer or _small_gradients(share) is None):
            self._settle(share)
            if by_layer and all(self._is_settled(other) for other in group.parameters):
                self._sum(group)

    def finish(self) -> None:
        """Sum the remaining groups."""
        for group in self._plan.groups:
            if group.name not in self.clipped and any(key in self._shares for key in group.parameters):
                self._sum(group)
        if self._left_out is not None:
            self.nonfinite = self._left_out.sum()

    def _is_settled(self, key: int) -> bool:
        share = self._shares.get(key)
        return not self._expected.get(key, 0) if share is None else share.squares is not None

    def _settle(self, share: _Share) -> None:
        """Merge the contributions, form them where that costs less, and compute the squared norm."""
        parts = [part.chosen(self._plan.norms) for part in merged(share.contributions)]
        match parts:
            case [part]:
                squares = part.terms()
            case [Rows() as rows, Lookup() as lookup]:  # a table tied to an output layer
                squares = rows.terms(lookup)
            case _:
                parts = merged(parts)
                squares = parts[0].terms()
        share.contributions, share.squares = parts, squares

    def _sum(self, group: Group) -> None:
        """Clip a group: norms, factors, and the weighted sums into .grad."""
        shares = {key: self._shares.pop(key) for key in group.parameters if key in self._shares}
        bundles = _bundled(shares)
        for share in shares.values():
            if share.squares is None:
                self._settle(share)
        terms = [share.squares for share in shares.values()] + [bundle.terms() for bundle, _ in bundles]
        grams = [each for each in terms if isinstance(each, Gram)]
        known = [each for each in terms if isinstance(each, Tensor)] + ([bounded(grams)] if grams else [])
        each = [part for share in shares.values() for part in share.contributions] + [bundle for bundle, _ in bundles]
        dtype = torch.float64 if all(part.dtype == torch.float64 for part in each) else torch.float32
        total = torch.cat(known, 1).sum(1, dtype=torch.float64)
        scale = (total.shape[0] if self._plan.mean else 1.0) / self._loss_scale
        lengths = total.sqrt() * scale  # a root of float32 squares would be 0 for small norms
        norms = lengths.to(dtype)
        drop = ~torch.isfinite(total.to(dtype)) | ~torch.isfinite(norms)  # in float32, large ones overflow: left out
        left_out = drop
        if self._mask is not None:
            counted = self._mask.to(device=drop.device, dtype=torch.bool)
            left_out, drop = drop & counted, drop | ~counted
        self._left_out = left_out if self._left_out is None else self._left_out | left_out
        lost = unresolved(dtype, sum(parameter.numel() for parameter in group.parameters.values()))
        above = (total + lost).sqrt() * scale * (1.0 + margin(dtype, norms.device))
        factors = (group.limit.to(norms.device) / above).clamp_(max=1.0).masked_fill_(drop, 0.0).to(dtype)
        weights = factors * scale
        self.clipped[group.name] = ClippedGroup(norms, factors)
        # 0 times a number is 0: only values that are not finite need clearing; a CPU can look whether there are any.
        unsafe = drop if drop.device.type != "cpu" or not bool(torch.isfinite(norms).all()) else None
        for key, share in shares.items():
            parameter = group.parameters[key]
            for part in share.contributions:
                self.formed = self.formed and part.formed
                self._add_total(parameter, part, weights.to(wide(parameter.dtype)), unsafe)
            share.contributions.clear()
        for bundle, keys in bundles:
            sums = bundle.total(weights.to(wide(bundle.each.dtype)), unsafe, bundle.each.shape[1:])
            self._add_bundle(sums, [group.parameters[key] for key in keys])

    def _added_to(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """Return the sum that this pass adds to, None if there is none yet."""
        sums = self._plan.sums
        return parameter.grad if sums is None else sums.get(id(parameter))

    def _begin_sum(self, parameter: torch.nn.Parameter, total: Tensor) -> None:
        if self._plan.sums is None:
            parameter.grad = total
        else:
            self._plan.sums[id(parameter)] = total

    def _add_bundle(self, sums: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add each part of sums (P,) to its parameter's sum."""
        parts = sums.split([parameter.numel() for parameter in parameters])
        gradients, added = [], []
        for parameter, part in zip(parameters, parts, strict=True):
            shaped = part.view(parameter.shape).to(parameter.dtype)
            if (grad := self._added_to(parameter)) is None:
                self._begin_sum(parameter, shaped.clone())  # memory of its own
            else:
                gradients.append(grad)
                added.append(shaped)
        if gradients:
            torch._foreach_add_(gradients, added)

    def _add_total(
        self, parameter: torch.nn.Parameter, part: Contribution, weights: Tensor, drop: Tensor | None
    ) -> None:
        grad = self._added_to(parameter)
        if grad is None:
            self._begin_sum(parameter, part.total(weights, drop, parameter.shape).to(parameter.dtype))
        elif grad.dtype == weights.dtype and grad.is_contiguous():
            part.add_to(grad, weights, drop)
        else:
            grad.add_(part.total(weights, drop, parameter.shape))


_SMALL = 8192
"""Largest number of a parameter's values whose formed gradients are bundled with others': a launch takes longer."""


def _small_gradients(share: _Share) -> Tensor | None:
    """Return the formed gradients of a parameter that has no others, and few values: a bias, a norm's scale."""
    match share.contributions:
        case [Dense(each, known=None, factor=None)] if each.shape[1:].numel() <= _SMALL:
            return each
    return None


def _bundled(shares: dict[int, _Share]) -> list[tuple[Dense, list[int]]]:
    """Remove the small unsettled shares and concatenate them, one bundle per dtype, with the parameters' keys."""
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for key, share in shares.items():
        if share.squares is None and (each := _small_gradients(share)) is not None:
            by_dtype.setdefault(each.dtype, {})[key] = each
    bundles = []
    for parts in by_dtype.values():
        if len(parts) > 1:
            flat = [part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts.values()]
            bundles.append((Dense(torch.cat(flat, 1)), list(parts)))
            for key in parts:
                del shares[key]
    return bundles


def makes_gradient(parameter: Tensor) -> bool:
    """Return whether the running backward pass makes a parameter's gradient, and not only that of other tensors.

    Raises UnsupportedCase if the pass is to be differentiated, or runs within another one.
    """
    if torch.is_grad_enabled():
        raise UnsupportedCase(
            "per-example clipping cannot be differentiated: call backward() without create_graph=True, or detach() the "
            "clipper for such a term"
        )
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            raise UnsupportedCase(
                "checkpoint(use_reentrant=True) runs a backward pass of its own, in which other layers' norms are not "
                "known: take use_reentrant=False"
            )
        frame = frame.f_back
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad: "a leaf node was passed"
        return False
