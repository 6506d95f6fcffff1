"""One backward pass: what it leaves is gathered by parameter, and summed with each example's weight when it is over."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.privacy.dp.clipping.contributions import Dense, Lookup, Piece, Rows, cross, merged
from accelerant.privacy.dp.clipping.norms import wide

__all__ = ["BackwardPass", "Group", "Plan", "require_plain_backward"]


@dataclass(slots=True)
class Group:
    """Parameters that are clipped by one norm.

    Attributes:
        name: of the layer; empty where it is the whole model.
        parameters: their identities, in the model's order: sums over them have the same bits in each run.
        bound: the norm that each example's gradient is clipped to.
        limit: the same on the device, for what a CUDA graph reads at each replay.
    """

    name: str
    parameters: list[int]
    bound: float
    limit: Tensor

    def set(self, bound: float) -> None:
        """Take another bound."""
        self.bound = bound
        self.limit.fill_(bound)


@dataclass(slots=True)
class Plan:
    """What stays the same from pass to pass.

    Attributes:
        names: of the parameters, by identity.
        parameters: themselves, by identity.
        groups: all parameters, each in one.
        norms: "auto", "ghost" or "instantiate".
        mean: whether the loss is the mean over examples.
    """

    names: Mapping[int, str]
    parameters: Mapping[int, torch.nn.Parameter]
    groups: Sequence[Group]
    norms: str
    mean: bool
    group_of: Mapping[int, Group] = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = {parameter: group for group in self.groups for parameter in group.parameters}

    @property
    def early(self) -> bool:
        """Whether a layer can be summed before the pass is over."""
        return len(self.groups) > 1


@dataclass(slots=True)
class _Share:
    """Of one parameter: pieces, how many came, and their squared norm once they are settled."""

    pieces: list[Piece] = field(default_factory=list)
    came: int = 0
    squares: Tensor | None = None


@dataclass(slots=True)
class Clipped:
    """Of one group: norms of its gradients, as examples have them, and what they were multiplied by; (B,) each."""

    norms: Tensor
    factors: Tensor


class BackwardPass:
    """Gathers pieces; knows the norms, and adds the weighted sums to the gradients, when all are there.

    Args:
        task: autograd's number of the pass.
        plan: what is clipped, and how.
        expected: how many pieces each parameter is to get; more may come.
        mask: (B,) bool, examples that count; None for all.
        loss_scale: that the loss was multiplied by.
    """

    def __init__(
        self, task: int, plan: Plan, expected: Mapping[int, int], mask: Tensor | None, loss_scale: float | Tensor
    ) -> None:
        self.task = task
        self.examples: int | None = None
        self.clipped: dict[str, Clipped] = {}
        self.formed = True
        self.nonfinite: Tensor | None = None
        self._left_out: Tensor | None = None
        self._plan = plan
        self._expected = dict(expected)
        self._mask = mask
        self._loss_scale = loss_scale
        self._shares: dict[int, _Share] = {}

    def add(self, parameter: Tensor, piece: Piece, examples: int) -> None:
        """Take a piece of a parameter's gradients, of so many examples."""
        name = self._plan.names[id(parameter)]
        self._require(examples, name)
        group = self._plan.group_of[id(parameter)]
        if group.name in self.clipped:
            raise UnsupportedCase(
                f"{name} got another contribution after its layer was clipped; forward passes that were dropped or "
                'recomputed do that: take clipping="flat"'
            )
        if self._plan.early and isinstance(piece, Rows):
            piece.done = False  # the layer's input gradient may be made after its sum
        share = self._shares.setdefault(id(parameter), _Share())
        share.pieces.append(piece)
        share.came += 1
        share.squares = None
        if share.came == self._expected.get(id(parameter), 0) and (self._plan.early or not _is_small(share)):
            self._settle(share)
            if self._plan.early and all(self._complete(each) for each in group.parameters):
                self._sum(group)

    def finish(self) -> None:
        """Sum what is left, with every norm known."""
        for group in self._plan.groups:
            if group.name not in self.clipped and any(each in self._shares for each in group.parameters):
                self._sum(group)
        if self._left_out is not None:
            self.nonfinite = self._left_out.sum()

    def _require(self, examples: int, name: str) -> None:
        if self.examples is None:
            self.examples = examples
            if self._mask is not None and self._mask.shape != (examples,):
                raise ShapeError(f"mask must be ({examples},), one for each example, got {tuple(self._mask.shape)}")
        elif self.examples != examples:
            raise ShapeError(
                f"all layers must see the same examples: {name} had {examples} in its first dimension, "
                f"layers after it {self.examples}"
            )

    def _complete(self, parameter: int) -> bool:
        share = self._shares.get(parameter)
        if share is None:
            return not self._expected.get(parameter, 0)
        return share.squares is not None

    def _settle(self, share: _Share) -> None:
        """Know the squared norm: pieces become one of each kind, formed where that costs less."""
        pieces = [self._chosen(piece) for piece in merged(share.pieces)]
        if len(pieces) > 1 and not all(isinstance(piece, (Rows, Lookup)) for piece in pieces):
            pieces = merged(pieces)
        found = pieces[0].squares()
        if len(pieces) > 1:
            rows, lookup = pieces
            assert isinstance(rows, Rows)
            assert isinstance(lookup, Lookup)
            found = (found + lookup.squares() + 2 * cross(lookup, rows)).clamp_(min=0)
        share.pieces, share.squares = pieces, found

    def _chosen(self, piece: Piece) -> Piece:
        """What costs less to know the norm of, where there is a choice."""
        if isinstance(piece, Lookup):
            return piece.compact()
        if piece.formed or self._plan.norms == "ghost":
            return piece
        if self._plan.norms == "instantiate":
            return piece.dense()
        return piece.preferred()

    def _sum(self, group: Group) -> None:
        shares = {each: self._shares.pop(each) for each in group.parameters if each in self._shares}
        bundles = _bundled(shares)
        for share in shares.values():
            if share.squares is None:
                self._settle(share)
        settled = [share.squares for share in shares.values()]
        total = _added([*settled, *(bundle.squares() for bundle, _ in bundles)])
        B = total.shape[0]
        scale = (B if self._plan.mean else 1.0) / self._loss_scale
        norms = total.sqrt() * scale
        drop = ~torch.isfinite(norms)
        if self._mask is not None:
            counted = self._mask.to(device=drop.device, dtype=torch.bool)
            self._count(drop & counted)
            drop = drop | ~counted
        else:
            self._count(drop)
        factors = (group.limit.to(norms.device) / norms).clamp_(max=1.0).masked_fill_(drop, 0.0)
        weights = factors * scale
        self.clipped[group.name] = Clipped(norms, factors)
        # 0 times a number is 0; only what is not finite needs to be left out, and a CPU can look whether there is any.
        some = drop if drop.device.type != "cpu" or not bool(torch.isfinite(norms).all()) else None
        for key, share in shares.items():
            parameter = self._plan.parameters[key]
            for piece in share.pieces:
                self.formed = self.formed and piece.formed
                _add(parameter, piece, weights.to(wide(parameter.dtype)), some)
            share.pieces.clear()
        for bundle, keys in bundles:
            sums = bundle.total(weights.to(wide(bundle.each.dtype)), some, bundle.each.shape[1:])
            _spread(sums, [self._plan.parameters[key] for key in keys])

    def _count(self, bad: Tensor) -> None:
        """Note examples that a layer leaves out: each is one, in however many layers."""
        self._left_out = bad if self._left_out is None else self._left_out | bad


SMALL = 8192
"""Values of a parameter, at most, whose formed gradients are joined to others': a launch takes longer than they do."""


def _is_small(share: _Share) -> bool:
    """Whether a parameter has but one piece, of few formed gradients: a bias, a norm's scale."""
    (first, *others) = share.pieces
    if others or not isinstance(first, Dense) or first.known is not None or first.factor is not None:
        return False
    return first.each.shape[1:].numel() <= SMALL


def _bundled(shares: dict[int, _Share]) -> list[tuple[Dense, list[int]]]:
    """Take the small ones out of what is to be settled: side by side, one for each dtype, with the parameters' keys."""
    groups: dict[torch.dtype, list[int]] = {}
    for key, share in shares.items():
        if share.squares is None and _is_small(share):
            groups.setdefault(cast(Dense, share.pieces[0]).each.dtype, []).append(key)
    found = []
    for keys in groups.values():
        if len(keys) > 1:
            parts = [cast(Dense, shares.pop(key).pieces[0]).each for key in keys]
            found.append(
                (Dense(torch.cat([part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts], 1)), keys)
            )
    return found


def _spread(sums: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add the parts of sums (P,) to the gradients that they belong to."""
    parts = sums.split([parameter.numel() for parameter in parameters])
    there, found = [], []
    for parameter, part in zip(parameters, parts, strict=True):
        shaped = part.view(parameter.shape).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = shaped.clone()  # memory of its own
        else:
            there.append(parameter.grad)
            found.append(shaped)
    if there:
        torch._foreach_add_(there, found)


def _added(tensors: Iterable[Tensor | None]) -> Tensor:
    found = [tensor for tensor in tensors if tensor is not None]
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in found) else torch.float32
    return torch.stack([each.to(dtype) for each in found]).sum(0)


def _add(parameter: torch.nn.Parameter, piece: Piece, weights: Tensor, drop: Tensor | None) -> None:
    """Add a weighted sum to a parameter's gradient."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = piece.total(weights, drop, parameter.shape).to(parameter.dtype)
    elif grad.dtype == weights.dtype and grad.is_contiguous():
        piece.add_to(grad, weights, drop)
    else:
        grad.add_(piece.total(weights, drop, parameter.shape))


def require_plain_backward(parameter: Tensor) -> bool:
    """Whether the backward pass that runs is to make a parameter's gradient: not where only others' are asked for.

    Raises:
        UnsupportedCase: it is to be differentiated itself, or it runs within another one.
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
