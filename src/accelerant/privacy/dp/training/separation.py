"""Checks, before the first step, that no example's gradient depends on another example, and of the loss's reduction.

The first batch is passed through the model several more times, each time with about half of its rows replaced by
others, and no other row's gradient may change, in any layer: not its norm, and not the sum of those that were kept. For
every two rows some pass replaces the first and keeps the second (Sperner 1928). Seeds, shapes and random output
gradients are the same in each pass; generators, buffers and attributes are restored after it.

Passes differ by rounding, too, which is independent from pass to pass. So two differences are taken, each of passes of
its own: for n numbers their inner product is 1 / sqrt(n) of the product of their norms for rounding, for a mixture its
square. Above an eighth of the precision, it is refused if differences in float32 have it in common. In a batch of other
rows, fewer or one more, a row must have the same norms. Some later batches are looked at again, at random. Gradients
must not depend on the batch before.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
import warnings
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.clipping.clipper import batch_size, undisturbed
from accelerant.privacy.dp.clipping.rules import mapped, model_methods, tensors_of

_TOLERANCE = 2e-5  # change of a gradient that counts as none in float32, relative to the layer's
_REPEATS = 8  # differences in float32 of which every two must have a change in common that is refused
_LARGE = 1e3  # a row's largest value, over the median of the rows', beyond which it may hide a change
_RANDOM = 1e-2  # change between equal passes from which a model is random beyond the seeds


_AGAIN = (2, 4, 8)  # Forward passes after the check's that are looked at again, with one choice of rows
_SHARE = 1 / 512  # Of the later passes: such a look takes as long as eight steps


@dataclass(slots=True)
class _Mode:
    """Progress of the check in one mode: layers that were seen, forward passes, and the next to be checked."""

    seen: set[str] = field(default_factory=set)
    forwards: int = 0
    next: int = 1
    done: bool = False


class _Gradients(NamedTuple):
    """A layer's gradients in one pass: the norms of the examples (B,), and the sums over those that were not masked."""

    norms: Tensor
    sums: list[Tensor]


_Passed = dict[str, _Gradients]
_Part = tuple[str, int]  # a layer, and 0 for its norms or 1 for its sums, which show a change of sign
_Difference = tuple[list[Tensor], float]  # changes of kept rows' gradients, and the layer's size


def _differences(now: dict[str, _Gradients], before: dict[str, _Gradients], kept: Tensor) -> dict[_Part, _Difference]:
    """Return what changed between two passes; the gradients of the one before are freed on the way."""
    found: dict[_Part, _Difference] = {}
    for name in now.keys() & before.keys():
        one, two = now[name], before.pop(name)
        scale = max(float(two.norms[kept].abs().max()), math.sqrt(_dot(two.sums, two.sums)))
        found[name, 0] = [(one.norms - two.norms)[kept]], scale
        found[name, 1] = [a - b for a, b in zip(one.sums, two.sums, strict=True)], scale
    return found


def _dot(one: list[Tensor], two: list[Tensor]) -> float:
    """Return the inner product of two lists of tensors; 0 if it is not finite."""
    found = math.fsum(
        float(torch.linalg.vecdot(a.flatten().double(), b.flatten().double())) for a, b in zip(one, two, strict=True)
    )
    return found if math.isfinite(found) else 0.0


class SeparationCheck:
    """Checks the first batch that can show whether a model keeps its examples apart; in train and eval mode, if used.

    Passes number 2, 4, 8 and so on are checked as well, until each layer that is used had gradients that are not zero.
    """

    def __init__(self, clipper: PerExampleClipper) -> None:
        self._clipper = clipper
        self._modes = {True: _Mode(), False: _Mode()}
        self._chance = random.Random()
        self._running = self._called = self._warned = self._knows_loss = False
        self.misfit = ""  # what is wrong with the reduction of a loss that the model returns

    @property
    def running(self) -> bool:
        """Whether a pass of the model is one of the check's."""
        return self._running

    @property
    def pending(self) -> bool:
        """Whether the next forward pass may have to be checked."""
        return not (self._running or self._modes[self._clipper.model.training].done)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the rows of a forward pass that is about to begin, if they can show anything new."""
        self._called = True
        mode = self._modes[self._clipper.model.training]
        mode.forwards += mode.done
        if mode.done and mode.forwards not in _AGAIN and self._chance.random() >= _SHARE:
            return
        rows = batch_size((*args, *kwargs.values()))
        if rows is None:
            self._warn("its input has no tensor with dimensions in tuples, lists or mappings")
        if rows is None or rows < 2 or torch._C._current_graph_task_id() != -1:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        mode.forwards += not mode.done
        if not mode.done and mode.forwards < mode.next:
            return
        if (others := _other_rows((args, kwargs), rows)) is None:
            return  # as in an empty draw, all of whose rows are padding
        other, typical = others
        self._running = True  # the passes of the check call the model, too
        try:
            if mode.done:
                some = torch.tensor([self._chance.random() < 0.5 for _ in range(rows)], device="cpu")
                part = self._chance.choice(_parts((args, kwargs), rows, self._chance))
                self._refuse(_Passes(self._clipper, other, (args, kwargs)), [some, ~typical], [part])
                return
            used, seen = self._check(other, typical, (args, kwargs))
        finally:
            self._running = False
        mode.next = 2 * mode.forwards  # unless the check failed: then the next pass is checked
        mode.seen |= seen
        mode.done = used <= mode.seen and bool(mode.seen)

    def before_backward(self, losses: Callable[[], Sequence[tuple[Tensor, Tensor | None]]]) -> None:
        """Check, before the first backward pass over several rows, how the loss adds them up, if it shows."""
        if self._knows_loss or self._clipper.examples == 1:
            return
        self._knows_loss = True
        if not self._called and type(self._clipper.model) not in model_methods:
            self._warn("the model's parts were called, not the model")
        wanted = self._clipper.loss_reduction
        for root in (loss.grad_fn for loss, _ in losses()):
            found = _reduction(root)
            if root is not None and found not in (None, wanted):
                raise ConfigError(
                    f"the loss is a {found} over the batch ({root.name()}), and make_private was given "
                    f"loss_reduction={wanted!r}: examples would be clipped to a bound that changes with the number of "
                    f"rows. Give loss_reduction={found!r}, or a loss that is a {wanted}"
                )

    def _check(
        self, other: Tensor, typical: Tensor, inputs: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[set[str], set[str]]:
        """Compare passes; return the layers that were used, and those that showed their examples apart."""
        passes = _Passes(self._clipper, other, inputs)
        equal = passes.begin()
        if equal is False:
            passes.precise = True
            equal = passes.begin()
        if not equal:
            self._warn("the model returned no tensors" if equal is None else "two equal passes of the model differ")
            return set(), set()
        parts = _parts(inputs, len(other), self._chance)
        changed = self._refuse(passes, [*_patterns(len(other)), ~typical], parts)
        if kept := passes.remembers():
            raise UnsupportedCase(
                f"the gradient of an example depends on the batch before: the model keeps a state that follows its "
                f"examples{kept}. Later steps would use it, without noise and without a bound. Leave it out, or make "
                "it a constant"
            )
        for name, value in passes.buffers[0].items():
            same = [name in now and torch.equal(value, now[name]) for now in passes.buffers[1:]]
            if same[0] and not all(same):
                warnings.warn(
                    f"the buffer {name} follows the examples of the batch: it is stored with the model, and no noise "
                    "is added. Leave it out",
                    UserWarning,
                    stacklevel=2,
                )
        self.misfit = passes.misfit()
        if not changed:
            self._warn("no row of the input changes any gradient")
        return set(passes.before), changed

    def _refuse(self, passes: _Passes, patterns: list[Tensor], parts: list[Tensor]) -> set[str]:
        """Raise UnsupportedCase if rows that are replaced, or left out, change others; return what changed."""
        rows = len(patterns[0])
        mixed, changed = passes.compare(patterns)
        square = _square(passes.inputs, rows) if mixed else set()
        if square and passes.takes_another_row(square) and not passes.takes_another_row():  # they are no rows
            passes.shared = square
            mixed, changed = passes.compare(patterns)
        if not mixed:
            passes.backward = True
            mixed, _ = passes.compare(patterns[:1])
            passes.backward = False
            if mixed and not passes.returns_rows():
                mixed = set()
        how = "some rows were replaced, and gradients of other rows changed"
        if not mixed and (mixed := passes.differing(parts)):
            how = "in a batch of fewer rows, or of one more, the same rows had other gradients"
        if mixed:
            layers = dict.fromkeys(name.rpartition(".")[0] for name, _ in self._clipper.parameters)
            names = ", ".join(name or type(self._clipper.model).__name__ for name in layers if name in mixed)
            raise UnsupportedCase(
                f"the gradient of an example depends on the other rows of the batch in {names}: {how}. Each layer must "
                "get the examples in dimension 0, in the order of the model's input, without a transposition or a "
                "permutation, and nothing may mix them, hooks neither. "
                "An input that all examples share must have 1 in its first dimension"
                + f"; one of shape ({rows}, {rows}) may be such an input, or a row for each example"
                * bool(square)
            )
        return changed

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"it was not checked whether the model keeps the examples of a batch apart: {reason}. The guarantee "
                "holds only if entry i of dimension 0 is example i in each layer",
                UserWarning,
                stacklevel=3,
            )


class _Passes:
    """Passes of a model over a batch, some of whose rows are replaced by others: row i by row other[i].

    In float32, with deterministic kernels, if `precise`. If `backward`, output gradients are replaced instead of
    inputs. `shared` are identities of inputs whose first dimension is no row.
    """

    def __init__(self, clipper: PerExampleClipper, other: Tensor, inputs: Any) -> None:
        self._clipper, self._other, self.inputs = clipper, other, inputs
        self._rows = torch.arange(len(other), device="cpu")
        self._device = clipper.parameters[0][1].device.type
        self.precise = False
        self.shared: Container[int] = ()
        self.backward = False
        self._lengths: list[int] = []
        self._has_loss, self._wanted = False, ""  # whether results have no dimensions; "numbers" or "rows" alone
        self.buffers: list[dict[str, Tensor]] = []
        self._states: list[dict[str, Tensor]] = []  # after earlier passes
        self.before: dict[str, Tensor] = {}  # norms of the layers that the passes use
        self._noise: dict[str, float] = {}

    def begin(self) -> bool | None:
        """Find the norms of the examples and their noise; return whether it is rounding, None if there are none."""
        passes = [self._passed(self._rows) for _ in range(2)]
        self.before, again = ({name: each.norms for name, each in found.items()} for found in passes)
        self._noise = {name: float((each - again[name]).abs().max()) for name, each in self.before.items()}
        if not self.before:
            return None
        return all(self._noise[name] <= _RANDOM * float(each.abs().max()) for name, each in self.before.items())

    def compare(self, patterns: list[Tensor]) -> tuple[set[str], set[str]]:
        """Return the layers where gradients of rows that were kept changed, and those where any did."""
        mixed, changed = set[str](), set[str]()
        for replaced in patterns:
            if bool(replaced.all()) or not bool(replaced.any()):
                continue
            moved, first = self._difference(replaced)
            for name, norms in moved.items():
                scale = float(self.before[name].abs().max())
                if bool((norms > 4 * self._noise[name] + _TOLERANCE * scale).any()):
                    changed.add(name)
            suspects = {part for part, each in first.items() if self._shows(each, each) and part[0] not in mixed}
            if suspects:
                second = self._difference(replaced)[1]
                suspects = {part for part in suspects & second.keys() if self._shows(first[part], second[part])}
            if suspects:
                first = {}  # their memory
                mixed |= self._confirmed(lambda replaced=replaced: self._difference(replaced)[1], suspects)  # type: ignore[misc]  # bound
        return mixed, changed

    def _shows(self, one: _Difference, two: _Difference) -> bool:
        """Return whether two differences have more in common than an eighth of the passes' precision."""
        tolerance = _TOLERANCE
        if not self.precise and torch.is_autocast_enabled(self._device):
            tolerance = max(tolerance, torch.finfo(torch.get_autocast_dtype(self._device)).eps / 8)
        return math.sqrt(max(0.0, _dot(one[0], two[0]))) > tolerance * max(one[1], sys.float_info.min)

    def remembers(self) -> str:
        """Return the names of what the model keeps of a batch before, if a gradient depends on it; else ""."""

        def difference() -> dict[_Part, _Difference]:
            self._states.clear()
            alone = self._passed(self._rows, earlier=self._rows)
            after = self._passed(self._rows, earlier=self._other)
            return _differences(after, alone, torch.ones_like(self._rows, dtype=torch.bool))

        if not self._confirmed(difference, {(name, kind) for name in self.before for kind in (0, 1)}):
            return ""
        one, two = self._states[0], self._states[-1]
        names = [name for name in two if name not in one or not torch.equal(one[name], two[name])]
        return f" ({', '.join(names) or 'in no tensor of its modules'})"

    def _confirmed(self, difference: Callable[[], dict[_Part, _Difference]], suspects: set[_Part]) -> set[str]:
        """Return the layers where differences of precise passes all have a change in common."""
        before, self.precise = self.precise, True
        known: list[dict[_Part, _Difference]] = []
        try:
            while suspects and len(known) < _REPEATS:
                found = difference()
                known.append({part: found[part] for part in suspects & found.keys()})
                suspects = {
                    part for part in known[-1] if all(self._shows(known[-1][part], each[part]) for each in known)
                }
                if len(known) > 1 and all(all(map(torch.equal, known[0][x][0], known[-1][x][0])) for x in suspects):
                    break  # nothing is random
        finally:
            self.precise = before
        return {name for name, _ in suspects}

    def _difference(self, replaced: Tensor) -> tuple[dict[str, Tensor], dict[_Part, _Difference]]:
        """Return how the rows' norms moved when some rows were replaced, and what changed of those that were kept."""
        kept = ~replaced
        alone = self._passed(self._rows, kept)
        after = self._passed(torch.where(replaced, self._other, self._rows), kept)
        moved = {name: (self.before[name] - after[name].norms).abs() for name in after.keys() & self.before.keys()}
        return moved, _differences(after, alone, kept)

    def misfit(self) -> str:
        """Return what is wrong with the reduction of a loss that the model returns, by half of the rows; "" if not."""
        few, given = (len(self._rows) + 1) // 2, self._clipper.loss_reduction
        if not self._has_loss or few < 2:
            return ""
        other, share = ("sum", few / len(self._rows)) if given == "mean" else ("mean", len(self._rows) / few)
        shares = {given: 1.0, other: share}
        for whole, _, _, part in self._in_parts("numbers", [self._rows[:few]]):
            for name in whole.keys() & part.keys():
                one, two = whole[name].norms, part[name].norms
                shares = {kind: x for kind, x in shares.items() if not _differ(two, x * one[:few], one)}
        return misfit(given, list(shares))

    def differing(self, parts: list[Tensor]) -> set[str]:
        """Return the layers where rows have other gradients in batches of other rows, and of another number of them."""
        differing = set[str]()
        for whole, index, same, part in self._in_parts("rows", parts):
            share = len(self._rows) / len(index) if self._clipper.loss_reduction == "mean" else 1.0
            for name in whole.keys() & part.keys():
                one, two = whole[name], part[name]
                if _differ(two.norms * share, one.norms[index], one.norms):
                    differing.add(name)
                if name in same:
                    change = [x - y * share for x, y in zip(same[name].sums, two.sums, strict=True)]
                    if math.sqrt(_dot(change, change)) > 1e-2 * len(index) * float(one.norms.max()):
                        differing.add(name)
        return differing

    def _in_parts(self, wanted: str, parts: list[Tensor]) -> Iterator[tuple[_Passed, Tensor, _Passed, _Passed]]:
        """Yield gradients in the whole batch, of layers where nothing is random, a part, and its gradients.

        These are those in the whole batch and alone; there are none where the model raises an error.
        """
        modes, before = [(each, each.training) for each in self._clipper.model.modules()], self.precise
        devices = [x.get_device() for _, x in self._clipper.parameters[:1] if x.is_cuda]
        lengths, rows = list[int](), len(self._rows)
        self._wanted, self.precise = wanted, True

        def passed(index: Tensor, mask: Tensor | None = None) -> _Passed:
            try:
                found = self._passed(index, mask)
                scaled = [x * rows == y * len(index) for x, y in zip(self._lengths, lengths, strict=False)]
                return found if all(scaled) or wanted == "numbers" else {}
            except Exception as error:  # noqa: BLE001 - the model's own
                if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                    warnings.warn(
                        "memory ran out while it was checked whether the model keeps the examples of a batch apart, in "
                        "batches of other rows: the guarantee holds only if it does",
                        UserWarning,
                        stacklevel=2,
                    )
                return {}  # it is written for so many rows, or gives no loss in eval mode

        try:
            for training in (None, False):  # dropout is drawn for so many rows
                for module, _ in modes if training is False else ():
                    module.training = False
                lengths, whole = [], passed(self._rows)
                lengths = [*self._lengths]
                with torch.random.fork_rng(devices):
                    for each in (torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)):
                        each.manual_seed(0)
                    again = passed(self._rows)
                steady = {
                    name: each
                    for name, each in whole.items()
                    if name in again and not _differ(each.norms, again[name].norms, each.norms)
                }
                if len(steady) == len(whole):
                    break
            masks = [self._rows.new_zeros(rows, dtype=torch.bool).index_fill(0, part, True) for part in parts]
            for part, mask in zip(parts, masks if steady else [], strict=False):
                same = passed(self._rows, mask) if len(part) <= rows and wanted == "rows" else {}
                yield steady, part, same, passed(part)
        finally:
            self._wanted, self.precise = "", before
            for module, mode in modes:
                module.training = mode

    def takes_another_row(self, shared: Container[int] = ()) -> bool:
        """Return whether the model runs with one row more, in the inputs of so many rows that are not shared."""
        try:
            self._run(torch.cat((self._rows, self._rows[-1:])), shared)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError, UnsupportedCase):
            return False
        return True

    def returns_rows(self) -> bool:
        """Return whether each of the model's results with so many entries has one for each row, as far as is known."""
        before, rows = self._lengths, len(self._rows)
        if not self.takes_another_row(self.shared):
            return True
        return all(one != rows or two == rows + 1 for one, two in zip(before, self._lengths, strict=False))

    def _passed(
        self, index: Tensor, mask: Tensor | None = None, earlier: Tensor | None = None
    ) -> dict[str, _Gradients]:
        norms, sums = self._run(index, self.shared, mask, earlier)
        return {name: _Gradients(x.double().nan_to_num(-1.0, -1.0).cpu(), sums[name]) for name, x in norms.items()}

    def _run(
        self, index: Tensor, shared: Container[int], mask: Tensor | None = None, earlier: Tensor | None = None
    ) -> Any:
        """Run the model on the rows of an index, after earlier ones; in float32 if that is asked for and it can."""
        if self.precise:
            try:
                with _deterministic(), torch.autocast(self._device, enabled=False):
                    return self._trial(index, shared, mask, earlier)
            except RuntimeError:  # it needs autocast, or less memory
                with _deterministic():
                    return self._trial(index, shared, mask, earlier)
        return self._trial(index, shared, mask, earlier)

    def _trial(self, index: Tensor, shared: Container[int], mask: Tensor | None, earlier: Tensor | None) -> Any:
        model, rows = self._clipper.model, len(self._rows)
        widened = self.precise and not torch.is_autocast_enabled(self._device)

        def inputs(index: Tensor) -> Any:
            return mapped(
                self.inputs, lambda each: _detached(each, rows, None if id(each) in shared else index, widened)
            )

        def results() -> Any:
            found = model(*args, **kwargs)
            self._lengths = [len(each) for each in tensors_of(found) if each.dim()]
            numbers = [each for each in tensors_of(found) if not each.dim() and each.requires_grad]
            self._has_loss = bool(numbers)
            if self._wanted == "rows":
                found = [each for each in tensors_of(found) if each.dim() and each.requires_grad]
                self._lengths = [len(each) for each in found]
            return numbers if self._wanted == "numbers" else found

        args, kwargs = inputs(self._rows if self.backward else index)
        # The hooks keep these passes from those of a checkpoint that the model is called in.
        with undisturbed(model), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            if earlier is not None:
                before, more = inputs(earlier)
                devices = [param.get_device() for _, param in self._clipper.parameters[:1] if param.is_cuda]
                with torch.no_grad(), torch.random.fork_rng(devices):  # numbers that it draws are no state
                    model(*before, **more)
                self._states.append(_kept(model))
            found = self._clipper.trial(results, mask, index if self.backward or self._wanted else None, rows)
            if len(index) == rows and earlier is None:
                self.buffers.append(_stored(model))
        return found


@contextmanager
def _deterministic() -> Generator[None]:
    """Choose deterministic kernels where there are any."""
    settings: Any = torch.utils.deterministic
    mode, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode("warn")
        settings.fill_uninitialized_memory = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis.*")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = filled


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that files of the model contain."""
    return {
        f"{name}.{key}".strip("."): buffer.clone()
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers, and of other tensors that modules have for attributes."""
    return {
        f"{name}.{key}".strip("."): each.detach().clone()
        for name, module in model.named_modules()
        for key, each in (*module._buffers.items(), *vars(module).items())
        if isinstance(each, Tensor) and each.layout == torch.strided
    }


def _patterns(rows: int) -> list[Tensor]:
    """Return masks of rows such that for every two rows some mask has the first and not the second."""
    count = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= rows)
    codes = list(itertools.islice(itertools.combinations(range(count), count // 2), rows))
    return [torch.tensor([bit in code for code in codes], device="cpu") for bit in range(count)]


def _other_rows(inputs: Any, rows: int) -> tuple[Tensor, Tensor] | None:
    """Return for each row another that differs from it, and which rows are typical; None if all are equal.

    The others are the first typical row, or the first typical one unlike it. Rows that are not finite, or have values
    far above the median row's, could hide what others change.
    """
    typical, unlike = (torch.full((rows,), each, dtype=torch.bool, device="cpu") for each in (True, False))
    found = [each.detach() for each in tensors_of(inputs) if each.shape[:1] == (rows,)]
    for each in found:
        if each.is_floating_point() and each.layout == torch.strided and each.numel():
            sizes = each.abs().unsqueeze(-1).flatten(1).amax(1).double().cpu().nan_to_num(math.inf, math.inf)
            median = float(sizes.median())
            typical &= sizes <= (_LARGE * median if 0 < median < math.inf else sys.float_info.max)
    first = int(typical.int().argmax())
    for each in found:
        if each.layout == torch.strided:
            unlike |= (each != each[first : first + 1]).unsqueeze(-1).flatten(1).any(1).cpu()
        else:  # it is not compared
            unlike |= torch.arange(rows, device="cpu") != first
    if not bool(unlike.any()):
        return None
    best = unlike & typical if bool((unlike & typical).any()) else unlike
    return torch.where(unlike, first, int(best.int().argmax())), typical


def _parts(inputs: Any, rows: int, chance: random.Random) -> list[Tensor]:
    """Return rows of low and of high values, by two measures, some of them alone, and all with one of them twice."""
    values, largest = (torch.full((rows,), x, dtype=torch.float64, device="cpu") for x in (0.0, -math.inf))
    for each in tensors_of(inputs):
        if each.shape[:1] == (rows,) and each.layout == torch.strided and each.numel() and not each.is_complex():
            flat = each.detach().reshape(rows, -1).double().nan_to_num(0.0, 0.0, 0.0).cpu()
            values += flat.sum(1)
            largest = torch.maximum(largest, flat.amax(1))
    half = (rows + 1) // 2
    orders = [each.argsort(descending=down) for each in (values, largest) for down in (False, True)]
    more = torch.cat((orders[0], orders[0][chance.randrange(rows)][None]))
    return [*(order[:half] for order in orders), *(order[:1] for order in orders[:3]), more]


def _differ(found: Tensor, wanted: Tensor, whole: Tensor) -> bool:
    """Return whether norms, -1 for those that are not finite, differ by more than rounding in any of torch's modes."""
    changed = (found - wanted).abs() > 1e-2 * max(float(whole.max()), 1e-4)
    return bool((changed & ((found >= 0) | (wanted >= 0))).any())


def _square(inputs: Any, rows: int) -> set[int]:
    """Return identities of inputs that are (rows, rows), as a mask by chance: they are no rows if other counts pass."""
    _, *others = (each for each in tensors_of(inputs) if each.dim())  # the first tells the number of rows
    return {id(each) for each in others if each.shape == (rows, rows)}


def _detached(each: Tensor, rows: int, index: Tensor | None, widened: bool) -> Tensor:
    """Return an input of the model, with the rows of an index if it has so many, as a leaf of its own."""
    mine = each.detach()
    if widened and each.dtype in (torch.bfloat16, torch.float16):
        mine = mine.float()
    if index is not None and each.shape[:1] == (rows,):
        mine = mine.index_select(0, index.to(each.device))
    return mine.requires_grad_(each.requires_grad)


def running_losses() -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors at which the running backward pass began, and their gradients; none if not found."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    frames, own = sys._current_frames(), threading.get_ident()
    try:
        for thread in sorted(frames, key=lambda thread: thread != own):  # on a GPU the engine may have its own
            frame: Any = frames[thread]
            while run is not None and frame is not None:
                if frame.f_code is run.__code__:
                    losses, given = frame.f_locals["t_outputs"], frame.f_locals["args"][0]
                    return [(each, dy) for each, dy in zip(losses, given, strict=True) if isinstance(each, Tensor)]
                frame = frame.f_back
    finally:
        frames.clear()  # this frame is in it: a cycle would keep what the caller's variables hold
    return []


def _reduction(node: Any) -> str | None:
    """Return "mean" or "sum" if a loss ends in torch's own mean or sum of several values; None if it is not known."""
    name = "" if node is None else node.name()
    if name in ("NegBackward0", "AddBackward0", "SubBackward0"):
        terms = {_reduction(term) for term, _ in node.next_functions} - {None}
        return terms.pop() if len(terms) == 1 else None
    if name in ("SumBackward0", "MeanBackward0"):
        below = node.next_functions[0][0]
        if not node._saved_self_sym_sizes:  # of a scalar
            return _reduction(below)
        return None if _may_be_shares(below) else name.removesuffix("Backward0").lower()
    return {1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 0))


_ARRANGED = {  # operations, by their nodes' names, that arrange or add values divided before
    "Neg", "Add", "Sub", "Sum", "Mean", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute",
    "Select", "Slice", "Index", "MaskedSelect", "MaskedFill", "Where", "Clone", "ToCopy",
}  # fmt: skip


def _may_be_shares(node: Any) -> bool:
    """Return whether values may have been divided, say by the number of rows, or are of several losses."""
    found, seen = [node], set()
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind in ("Mul", "Div", "Stack", "Cat"):
            return True
        if kind in _ARRANGED:
            found += [below for below, _ in node.next_functions]
    return False


# --- for the checks of losses -----------------------------------------------------------------------------------------


def misfit(given: str, found: Sequence[str]) -> str:
    """Return what is wrong with a loss that half of the rows show to be reduced otherwise than was given, or ""."""
    if given in found:
        return ""
    shown = f"a {found[0]}" if found else "neither mean nor sum"
    remedy = f"loss_reduction={found[0]!r}, or " if found else ""
    return (
        f"the loss is no {given} over the rows, in all its terms: the gradients of half of them, without the others, "
        f"show {shown}. Examples would be clipped to a bound that changes with the number of rows. Give {remedy}a loss "
        f"that is a {given}"
    )


def rows_of(value: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return the rows of an index of a tensor that has a block of entries for each row."""
    blocks, each = index.to(value.device), value.shape[0] // rows
    if each > 1:
        blocks = (blocks[:, None] * each + torch.arange(each, device=value.device)).flatten()
    return value.index_select(0, blocks)


def caller_literals() -> frozenset[float]:
    """Return the literals in the code that called torch."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "accelerant"):
        frame = frame.f_back
    found, known = set[float](), list(frame.f_code.co_consts)
    while known:
        each = known.pop()
        if isinstance(each, (int, float)):
            found.update((each, -each))
        else:
            known += each if isinstance(each, (tuple, frozenset)) else getattr(each, "co_consts", ())
    return frozenset(found)


def compiled() -> bool:
    """Return whether this runs inside of code that torch.compile made, or is captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py") and frame.f_code.co_name == "compile_wrapper":
            return True
        frame = frame.f_back
    return False
