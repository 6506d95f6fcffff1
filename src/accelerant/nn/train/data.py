# ruff: noqa: D102  Source documents the methods of its subclasses
"""Training data as batches by step: tensors, arrays, datasets, loaders and token files.

The batch of a step depends on (seed, step) alone if the rows are numbered. A DataLoader has its own order: it is
restarted for each epoch with random states from (seed, epoch), and a resumed run skips used batches. A thread gathers
batches in advance, and never calls CUDA, which would invalidate the capture of a graph.
"""

import hashlib
import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.environment import forked_random
from accelerant.nn.train.parallel import share_of
from accelerant.nn.train.tokens import TokenFile, Tokens, require_tokens
from accelerant.runtime.host import as_torch_takes_it, refuse_masked, refuse_without_values
from accelerant.runtime.processes import Processes

Batch = tuple[Tensor, ...]
"""Tensors whose first dimension is the rows of a batch."""

Data = Tensor | np.ndarray[Any, Any] | Sequence[Any] | Dataset[Any] | DataLoader[Any] | TokenFile | Path | str
"""Tensors or arrays whose first dimension is the rows (several in a tuple or list), a torch Dataset or DataLoader, or a
token file or its path."""

_SAMPLED_ROWS = 256  # of a tensor, which enter its fingerprint
_AHEAD = 4  # batches that are gathered in advance


# --- random numbers and windows --------------------------------------------------------------------------------------
def _philox(seed: int, number: int) -> np.random.Philox:
    # The high word: the low one counts draws, so that consecutive numbers would share them.
    return np.random.Philox(key=seed, counter=np.array([0, 0, 0, number], np.uint64))


def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Return an epoch's order of `count` rows: the ranks of raw draws of Philox, the same in every NumPy version."""
    return np.argsort(_philox(seed, epoch).random_raw(count), kind="stable").astype(np.int64, copy=False)


def require_windows(tokens: Tokens, context: int, part: str) -> None:
    """Raise ConfigError unless there are enough tokens for a window and the token after it: context + 1."""
    if len(tokens) < context + 1:
        has = f"the {part} part has {len(tokens)} tokens, one window needs {context + 1}"
        raise ConfigError(f"not enough data: {has}; give --data more text")


def random_windows(
    tokens: Tokens, *, seed: int, step: int, count: int, context: int, share: slice = slice(None)
) -> NDArray[np.int64]:
    """Return a share of a step's `count` windows, (count, context + 1), at positions drawn by Philox(seed, step)."""
    starts = _philox(seed, step).random_raw(count) % np.uint64(len(tokens) - context)
    return gather(tokens, starts.astype(np.int64)[share], context)


def even_starts(tokens: Tokens, *, count: int, context: int) -> NDArray[np.int64]:
    """Return where up to `count` disjoint windows begin, spread evenly over the tokens."""
    fitting = (len(tokens) - 1) // context
    starts: NDArray[np.int64] = np.linspace(0, fitting - 1, min(count, fitting)).round().astype(np.int64)
    return np.unique(starts) * context


def gather(tokens: Tokens, starts: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """Return the windows that begin at `starts` (n,): (n, context + 1)."""
    windows: NDArray[np.int64] = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows


def halves(windows: NDArray[np.int64]) -> Batch:
    """Return the inputs and the targets of windows, (count, context) each, contiguous."""
    rows = torch.from_numpy(windows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def split(parts: Sequence[Batch], microbatch: int | None) -> list[Batch]:
    """Split the parts of a step into batches of microbatch rows; None leaves them as they are."""
    if microbatch is None:
        return list(parts)
    return [rows for part in parts for rows in zip(*(tensor.split(microbatch) for tensor in part), strict=True)]


def prefetched(make: Callable[[int], Batch], steps: range, *, pin: bool) -> Generator[Sequence[Batch]]:
    """Iterate steps of one batch, made on the CPU by a thread until the generator is closed, and pinned with `pin`."""
    thread, following = ThreadPoolExecutor(1, "accelerant-batches"), iter(steps[_AHEAD:])
    try:
        ready = deque(thread.submit(make, step) for step in steps[:_AHEAD])
        while ready:
            batch = ready.popleft().result()
            ready.extend(thread.submit(make, step) for step in itertools.islice(following, 1))
            yield [_pinned(batch, pin)]
    finally:
        thread.shutdown(cancel_futures=True)


# --- sources ---------------------------------------------------------------------------------------------------------
class Source(ABC):
    """Data as batches by step.

    `size` and `per_step` count samples or tokens (`unit`) in the data, and in a step of all processes. The parts of a
    step are split into batches of `microbatch` rows (None: as they are), `accumulate` of them in this process (0: the
    config's). `fixed`: the parts of every step have the same shapes.
    """

    unit: Literal["samples", "tokens"] = "samples"
    size: int
    per_step: int
    microbatch: int | None
    accumulate: int = 0
    fixed: bool = True

    def steps(self, epochs: float) -> int:
        """Return the number of steps in so many passes over the data."""
        return max(1, math.ceil(epochs * self.size / self.per_step))

    def _divide(self, config: TrainConfig) -> None:
        """Take this process's rows of a batch, and as many of them at a time as the config says, or fewer."""
        processes = Processes()
        self._share, self.microbatch = share_of(config.batch_size, processes), config.microbatch
        if processes.size > 1:
            rows = config.batch_size // processes.size
            most = min(rows, config.microbatch)
            self.microbatch = next(count for count in range(most, 0, -1) if rows % count == 0)
            self.accumulate = rows // self.microbatch

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that differs for other data, so that a run does not resume with them."""

    @abstractmethod
    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        """Iterate the parts of consecutive steps from `position` on, prefetched and pinned with `pin`; close it."""

    def position(self) -> dict[str, int]:
        """Return what a resumed run needs in addition to the step."""
        return {}

    @abstractmethod
    def in_order(self, rows: int) -> Generator[Batch]:
        """Iterate all data once in batches of `rows`, the last perhaps smaller; close it, since it may hold workers."""

    @abstractmethod
    def rows(self) -> int | None:
        """Return the number of rows of `in_order`; None if it is unknown."""

    @abstractmethod
    def example(self) -> Batch:
        """Return one batch, for its shapes."""


class _RowSource(Source):
    """Numbered rows: permutations of the rows, one per epoch, are concatenated and cut into steps of batch_size."""

    def __init__(self, count: int, config: TrainConfig) -> None:
        if count < 1:
            raise ConfigError("the data have no rows")
        self._seed = config.seed
        self.size, self.per_step = count, config.batch_size
        self._divide(config)
        self._orders: dict[int, NDArray[np.int64]] = {}

    def rows(self) -> int | None:
        return self.size

    def numbers(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of this process's rows of a step; one that exceeds its epoch continues with the next."""
        start, end = step * self.per_step, (step + 1) * self.per_step
        parts = []
        while start < end:
            epoch, offset = divmod(start, self.size)
            count = min(end - start, self.size - offset)
            if epoch not in self._orders:
                self._orders = {number: order for number, order in self._orders.items() if number == epoch - 1}
                self._orders[epoch] = permutation(self._seed, epoch, self.size)
            parts.append(self._orders[epoch][offset : offset + count])
            start += count
        return np.concatenate(parts)[self._share]


class _TensorSource(_RowSource):
    """Tensors with the same number of rows."""

    def __init__(self, tensors: Batch, config: TrainConfig) -> None:
        rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
        if len(rows) != 1:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ShapeError(f"data and targets must have as many rows each, got {shapes}")
        super().__init__(rows.pop(), config)
        self._tensors = tensors

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for tensor in self._tensors:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            chosen = torch.linspace(0, self.size - 1, min(_SAMPLED_ROWS, self.size)).round().long()
            rows = tensor[chosen.to(tensor.device)].detach().cpu().contiguous()
            digest.update(rows.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        if pin and all(tensor.device.type == "cpu" for tensor in self._tensors):
            yield from prefetched(self._batch, steps, pin=True)
        else:
            for step in steps:
                yield [self._batch(step)]

    def in_order(self, rows: int) -> Generator[Batch]:
        yield from zip(*(tensor.split(rows) for tensor in self._tensors), strict=True)

    def example(self) -> Batch:
        return tuple(tensor[: self.microbatch] for tensor in self._tensors)

    def _batch(self, step: int) -> Batch:
        numbers = torch.from_numpy(self.numbers(step))
        return tuple(tensor.index_select(0, numbers.to(tensor.device)) for tensor in self._tensors)


class _DatasetSource(_RowSource):
    """A torch Dataset with a length. The main thread fetches its items, since they may draw random numbers."""

    def __init__(self, dataset: Dataset[Any], config: TrainConfig) -> None:
        super().__init__(len(dataset), config)  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset
        self._dataset = dataset

    def fingerprint(self) -> str:
        return f"{type(self._dataset).__qualname__} of {self.size}"

    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        for step in steps:
            yield [_pinned(self._collated(self.numbers(step)), pin)]

    def in_order(self, rows: int) -> Generator[Batch]:
        with forked_random(self._seed):  # evaluations draw the same numbers each time, and do not change the training
            for start in range(0, self.size, rows):
                yield self._collated(range(start, min(start + rows, self.size)))

    def example(self) -> Batch:
        with forked_random():
            return self._collated(range(min(self.size, self.microbatch or self.size)))

    def _collated(self, numbers: Iterable[int]) -> Batch:
        return _as_batch(default_collate([self._dataset[int(number)] for number in numbers]))


class _LoaderSource(Source):
    """A DataLoader: each of its batches is a part of a step, and a step has `accumulate` parts."""

    fixed = False

    def __init__(self, loader: DataLoader[Any], config: TrainConfig) -> None:
        self._loader = loader
        self._parts = config.accumulate
        self._seed = config.seed
        self.per_step = (loader.batch_size or 1) * self._parts
        self.microbatch = None
        self._position = {"epoch": 0, "used": 0}  # the number of the epoch's batches that were used
        self._processes = processes = Processes()
        if processes.size > 1:
            if isinstance(loader.sampler, DistributedSampler):
                advice = "give one without; each process takes its rows of each batch"
                raise ConfigError(f"the loader has a DistributedSampler: {advice}")
            size, count = loader.batch_size, self.rows()
            if size is not None:
                share_of(size, processes)
                if count is not None and not loader.drop_last and count % size:
                    self._mine((torch.empty(count % size),))

    def steps(self, epochs: float) -> int:
        try:
            length = len(self._loader)
        except TypeError:
            raise ConfigError("the loader's dataset has no length: give steps instead of epochs") from None
        return max(1, math.ceil(epochs * length / self._parts))

    def fingerprint(self) -> str:
        size = self.rows()
        kind = f"{type(self._loader.dataset).__qualname__} of {'unknown length' if size is None else size}"
        return f"{kind} in batches of {self._loader.batch_size}, {self._parts} a step"

    def position(self) -> dict[str, int]:
        return dict(self._position)

    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        stream = self._stream(position)
        for _ in steps:
            yield [_pinned(self._mine(next(stream)), pin) for _ in range(self._parts)]

    def in_order(self, rows: int) -> Generator[Batch]:
        with forked_random(self._seed):
            for batch in self._loader:
                yield _as_batch(batch)

    def rows(self) -> int | None:
        dataset = self._loader.dataset
        return len(dataset) if hasattr(dataset, "__len__") else None

    def example(self) -> Batch:
        return next(self.in_order(1))

    def _mine(self, batch: Batch) -> Batch:
        if len(batch[0]) % self._processes.size:
            raise ConfigError(
                f"the loader has a batch of {len(batch[0])} rows, which {self._processes.size} processes cannot share "
                "equally: give it drop_last=True, or another batch size"
            )
        return tuple(tensor[share_of(len(tensor), self._processes)] for tensor in batch)

    def _stream(self, position: dict[str, int]) -> Iterator[Batch]:
        """Iterate the batches of all epochs from a position on, and keep the position."""
        epoch, skipped = position.get("epoch", 0), position.get("used", 0)
        while True:
            used = 0
            batches = self._epoch(epoch)
            if skipped:
                with forked_random():  # the skipped batches drew their random numbers before the checkpoint
                    used = sum(1 for _ in itertools.islice(batches, skipped))
            for batch in batches:
                used += 1
                self._position = {"epoch": epoch, "used": used}
                yield _as_batch(batch)
            if not used:
                raise ConfigError(f"the loader gave no batch in epoch {epoch}")
            epoch, skipped = epoch + 1, 0

    def _epoch(self, epoch: int) -> Iterator[Any]:
        """Iterate the batches of an epoch, in an order drawn from (seed, epoch)."""
        seed = int(_philox(self._seed, epoch).random_raw()) >> 1  # below 2**63
        given = self._loader.batch_sampler
        for part in (self._loader, self._loader.sampler, given, getattr(given, "sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        with forked_random(seed):  # samplers draw at the first batch
            iterator = iter(self._loader)
            first = next(iterator, None)
        if first is not None:
            yield first
            yield from iterator


class TokenSource(Source):
    """Windows of tokens at random positions, of which an evaluation reads `evaluation_tokens` (0: all).

    Every token of a batch must be below `vocab_size`, else FormatError is raised; None for no check.
    """

    unit = "tokens"
    vocab_size: int | None = None

    def __init__(
        self, tokens: Tokens, config: TrainConfig, *, fingerprint: str, part: str = "training",
        evaluation_tokens: int = 0,
    ) -> None:  # fmt: skip
        require_windows(tokens, config.context, part)
        self._tokens, self._fingerprint, self._config, self._part = tokens, fingerprint, config, part
        self._evaluated = max(1, (evaluation_tokens or len(tokens)) // config.context)
        self.size, self.per_step = len(tokens), config.batch_size * config.context
        self._divide(config)

    def fingerprint(self) -> str:
        return self._fingerprint

    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        return prefetched(self._batch, steps, pin=pin)

    def in_order(self, rows: int) -> Generator[Batch]:
        """Iterate disjoint windows, spread evenly over the tokens if an evaluation does not read all of them."""
        starts = self._starts()
        for start in range(0, len(starts), rows):
            yield self._windows(gather(self._tokens, starts[start : start + rows], self._config.context))

    def rows(self) -> int | None:
        return len(self._starts())

    def example(self) -> Batch:
        rows = self.microbatch or self._config.microbatch
        return self._windows(gather(self._tokens, np.zeros(rows, np.int64), self._config.context))

    def _starts(self) -> NDArray[np.int64]:
        return even_starts(self._tokens, count=self._evaluated, context=self._config.context)

    def _batch(self, step: int) -> Batch:
        seed, count, context = self._config.seed, self._config.batch_size, self._config.context
        drawn = random_windows(self._tokens, seed=seed, step=step, count=count, context=context, share=self._share)
        return self._windows(drawn)

    def _windows(self, windows: NDArray[np.int64]) -> Batch:
        if self.vocab_size is not None:
            require_tokens(windows, self.vocab_size, f"the {self._part} part")
        return halves(windows)


def make_source(data: Data, targets: Data | None, config: TrainConfig) -> Source:
    """Return the source of a user's data, which are described at `Trainer.fit`, as the errors are."""
    if isinstance(data, str | Path):
        data = TokenFile(data)
    if isinstance(data, TokenFile | DataLoader | Dataset) and targets is not None:
        raise ConfigError(f"a {type(data).__name__} has its own targets: leave targets out")
    if isinstance(data, TokenFile):
        source = TokenSource(data.tokens, config, fingerprint=data.info.sha256, part=str(data.path))
        source.vocab_size = data.info.vocab_size
        return source
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=config.microbatch)
    if isinstance(data, DataLoader):
        return _LoaderSource(data, config)
    if isinstance(data, Dataset):
        return _DatasetSource(data, config)
    return _TensorSource((*_tensors(data, "data"), *(() if targets is None else _tensors(targets, "targets"))), config)


def _tensors(data: Any, name: str) -> Batch:
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        return tuple(_tensor(part, name) for part in data)
    return (_tensor(data, name),)


def _tensor(data: Any, name: str) -> Tensor:
    if isinstance(data, Tensor):
        refuse_without_values(data, name)
        return data.detach()
    refuse_masked(data, name)
    try:
        array = as_torch_takes_it(np.asarray(data))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about a read-only map: nothing writes to it here
            return _default_precision(torch.from_numpy(array))
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = "tensors, arrays, a Dataset, a DataLoader or a token file"
        raise ConfigError(f"{name} must be {kinds}; got {type(data).__name__}: {error}") from None


def _default_precision(tensor: Tensor) -> Tensor:
    """Return float64, in which Python and NumPy compute, as torch's default dtype, which parameters have."""
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _as_batch(items: Any) -> Batch:
    if isinstance(items, Tensor):
        return (items,)
    if isinstance(items, tuple | list) and all(isinstance(item, Tensor) for item in items):
        return tuple(map(_default_precision, items))
    got = type(items).__name__
    raise UnsupportedCase(f"a batch must be tensors in a tuple or list, got {got}: give the loader a collate_fn")


def _pinned(batch: Batch, pin: bool) -> Batch:
    return tuple(x.pin_memory() if x.device.type == "cpu" else x for x in batch) if pin else batch
