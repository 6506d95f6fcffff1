"""Sentence encoders: BERT's kin, whose mean (or first) token is the vector of a text.

h = norm(words + positions + kinds);  h = norm(h + attention(h)), h = norm(h + mlp(h)) in each block
vector = mean over tokens of h, or h of the first token; then scaled to unit length

Texts are sorted by length and packed one after the other, so that no padding is computed.

Source: Devlin et al. 2018, arXiv:1810.04805; Reimers and Gurevych 2019, arXiv:1908.10084, section 3.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, FormatError, RangeError, UnsupportedCase
from accelerant.nn.layers import LayerNorm, Linear
from accelerant.nn.models.hugging_face import Fields, Layout, Part, built, described, read_object
from accelerant.nn.models.tokenizer import read_tokenizer
from accelerant.runtime.files import clipped, decode_json, read_regular

_BATCH_TOKENS = 8192, 65536
"""Tokens of a batch, on a CPU and on a GPU."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class _Config:
    vocab_size: int
    positions: int
    kinds: int
    layers: int
    heads: int
    width: int
    hidden: int
    eps: float
    approximate: str
    first: int  # position of the first token
    tied: bool = False


def _from_fields(fields: Fields, values: dict[str, Any]) -> _Config:
    for name in ("vocab_size", "positions", "kinds", "layers", "heads", "width", "hidden"):
        if values[name] < 1:
            raise FormatError(f"{fields.origin}: {name} must be at least 1, got {values[name]}")
    if values["width"] % values["heads"]:
        raise FormatError(
            f"{fields.origin}: hidden_size {values['width']} is not a multiple of {values['heads']} heads"
        )
    first = 0 if fields.get("model_type") == "bert" else fields.read("pad_token_id", int, 1) + 1
    if not 0 <= first < values["positions"]:
        raise FormatError(f"{fields.origin}: pad_token_id leaves no positions")
    return _Config(**values, approximate=_ACTIVATIONS[fields.get("hidden_act", "gelu")], first=first)


def _parts(config: _Config) -> dict[str, tuple[Part, ...]]:
    width, hidden = config.width, config.hidden
    sizes = {"words": config.vocab_size, "positions": config.positions, "kinds": config.kinds}
    names = {"words": "word_embeddings", "positions": "position_embeddings", "kinds": "token_type_embeddings"}
    parts: dict[str, tuple[Part, ...]] = {
        f"{our}.weight": (Part(f"embeddings.{names[our]}.weight", (size, width)),) for our, size in sizes.items()
    }

    def add(our: str, theirs: Sequence[str], *shape: int) -> None:
        parts[f"{our}.weight"] = tuple(Part(f"{name}.weight", shape) for name in theirs)
        parts[f"{our}.bias"] = tuple(Part(f"{name}.bias", shape[:1]) for name in theirs)

    add("norm", ["embeddings.LayerNorm"], width)
    for i in range(config.layers):
        our, their = f"blocks.{i}", f"encoder.layer.{i}"
        add(f"{our}.qkv", [f"{their}.attention.self.{name}" for name in ("query", "key", "value")], width, width)
        add(f"{our}.out", [f"{their}.attention.output.dense"], width, width)
        add(f"{our}.norm1", [f"{their}.attention.output.LayerNorm"], width)
        add(f"{our}.up", [f"{their}.intermediate.dense"], hidden, width)
        add(f"{our}.down", [f"{their}.output.dense"], width, hidden)
        add(f"{our}.norm2", [f"{their}.output.LayerNorm"], width)
    return parts


LAYOUTS = {
    kind: Layout(
        model_type=kind, architecture=architecture, prefix=prefix, embedding="embeddings.word_embeddings.weight",
        fields={
            "vocab_size": ("vocab_size", 30522), "positions": ("max_position_embeddings", 512),
            "kinds": ("type_vocab_size", 2), "layers": ("num_hidden_layers", 12),
            "heads": ("num_attention_heads", 12), "width": ("hidden_size", 768), "hidden": ("intermediate_size", 3072),
            "eps": ("layer_norm_eps", 1e-12),
        },
        required={
            "hidden_act": tuple(_ACTIVATIONS), "position_embedding_type": ("absolute",), "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        from_fields=_from_fields, more_fields=lambda config: {}, parts=_parts,
        ignored=re.compile(r"embeddings\.(position_ids|token_type_ids)|(pooler|cls|lm_head)\..*"),
    )
    for kind, architecture, prefix in (
        ("bert", "BertModel", "bert."), ("roberta", "RobertaModel", "roberta."),
        ("xlm-roberta", "XLMRobertaModel", "roberta."),
    )
}  # fmt: skip


class _Block(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.heads, self.approximate = config.heads, config.approximate
        self.qkv, self.out = Linear(config.width, 3 * config.width), Linear(config.width, config.width)
        self.up, self.down = Linear(config.width, config.hidden), Linear(config.hidden, config.width)
        self.norm1, self.norm2 = (LayerNorm(config.width, eps=config.eps) for _ in range(2))

    def forward(self, h: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Return h, (tokens, width), after the block; `starts` are the texts' offsets."""
        q, k, v = self.qkv(h).view(len(h), 3, self.heads, -1).unbind(1)
        mixed = ops.attention_varlen(q, k, v, starts, starts, longest, longest)
        assert isinstance(mixed, Tensor)  # for the type checker: no logarithms are asked for
        h = self._added(self.out(mixed.reshape(len(h), -1)), h, self.norm1)
        return self._added(self.down(ops.linear_gelu(h, self.up.weight, self.up.bias, self.approximate)), h, self.norm2)

    @staticmethod
    def _added(x: Tensor, h: Tensor, norm: LayerNorm) -> Tensor:
        return ops.add_layer_norm(x, h, norm.weight, norm.bias, norm.eps)[0]


class _Model(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.kinds = nn.Embedding(config.kinds, config.width)
        self.norm = LayerNorm(config.width, eps=config.eps)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))

    def forward(self, ids: Tensor, positions: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Return the last hidden states of packed tokens, (tokens, width)."""
        h: Tensor = self.words(ids) + self.positions(positions + self.config.first) + self.kinds.weight[0]
        h = self.norm(h)
        for block in self.blocks:
            h = block(h, starts, longest)
        return h


class Encoder:
    """A sentence encoder of BERT's kin (BERT, RoBERTa, XLM-RoBERTa), from a folder as sentence-transformers saves it.

    `path` has config.json, tokenizer.json and model.safetensors; `1_Pooling/config.json` says whether the mean or the
    first token counts, by default the mean. `dim` is the size of a vector, `max_tokens` the longest text, with the
    tokens that begin and end it. FormatError: files that are incomplete or contradict each other. UnsupportedCase:
    another architecture, pooling, or further layers.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        folder = Path(path)
        fields = Fields(read_object(folder / "config.json"), str(folder / "config.json"))
        kind = fields.get("model_type")
        if not isinstance(kind, str) or kind not in LAYOUTS:
            raise fields.unsupported("model_type", kind, " or ".join(LAYOUTS))
        self._mean = _pools_mean(folder)
        self.device = torch.device(device)
        self.tokenizer = read_tokenizer(folder)
        self._model = built(_Model, described(folder, [LAYOUTS[kind]]), dtype, self.device).eval()
        config = self._model.config
        self.dim, self.max_tokens = config.width, config.positions - config.first
        if (folder / "sentence_bert_config.json").is_file():
            fields = Fields(read_object(folder / "sentence_bert_config.json"), "sentence_bert_config.json")
            if fields.get("max_seq_length") is not None:
                self.max_tokens = min(self.max_tokens, max(2, fields.read("max_seq_length", int)))
        self.tokenizer.enable_truncation(self.max_tokens)

    def __repr__(self) -> str:
        pooling = "mean" if self._mean else "first token"
        return f"Encoder({self.dim} of {pooling}, up to {self.max_tokens} tokens, on {self.device})"

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of texts, (texts, dim) float32 of unit length, on the encoder's device."""
        if isinstance(texts, str):
            raise ConfigError("encode takes a list of texts, got one text: write [text]")
        return self.encode_ids(self.tokens(texts))

    def tokens(self, texts: Sequence[str], *, truncate: bool = True) -> list[list[int]]:
        """Return the ids of texts, with the tokens that begin and end each.

        Raises ConfigError for half of a surrogate pair, which is no character, and RangeError for texts to be cut.
        """
        for text in texts:
            if not isinstance(text, str) or _SURROGATE.search(text):
                raise ConfigError(f"not a text of Unicode characters: {clipped(text)}")
        found = self.tokenizer.encode_batch_fast(list(texts))
        for encoding in found if not truncate else ():
            if encoding.overflowing:
                raise RangeError(f"a text has at most {self.max_tokens:,} tokens here, got more: split it")
        return [encoding.ids for encoding in found]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a text begins and ends, in characters, however long the text is."""
        whole = type(self.tokenizer).from_str(self.tokenizer.to_str())
        whole.no_truncation()
        return list(whole.encode(text, add_special_tokens=False).offsets)

    @torch.inference_mode()
    def encode_ids(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of texts that are tokens already; errors as of `require_ids`."""
        self.require_ids(ids)
        most = _BATCH_TOKENS[self.device.type == "cuda"]
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._encoded(ids, most)
        return self._encoded(ids, most // 8)

    def _encoded(self, ids: Sequence[Sequence[int]], most: int) -> Tensor:
        lengths = np.array([len(row) for row in ids], np.int64)
        batches = list(_batches(lengths.tolist(), most))
        order = [row for batch in batches for row in batch]
        ends = lengths[order].cumsum()
        total = int(lengths.sum())
        tokens = np.fromiter(itertools.chain.from_iterable(ids[row] for row in order), np.int64, total)
        starts = torch.from_numpy(np.pad(ends, (1, 0))).to(self.device)  # all at once: a copy waits for what ran before
        flat = torch.from_numpy(tokens).to(self.device)
        positions = torch.arange(total, device=self.device)
        positions -= starts[:-1].repeat_interleave(starts.diff(), output_size=total)
        found, first, begin = torch.empty(len(ids), self.dim, device=self.device), 0, 0
        for rows in batches:
            stop, end = first + len(rows), int(ends[first + len(rows) - 1])
            offsets = starts[first : stop + 1] - begin
            h = self._model(flat[begin:end], positions[begin:end], offsets.int(), len(ids[rows[-1]])).float()
            pooled = torch.segment_reduce(h, "mean", offsets=offsets) if self._mean else h[offsets[:-1]]
            found[first:stop] = nn.functional.normalize(pooled)
            first, begin = stop, end
        return torch.empty_like(found).index_copy_(0, torch.tensor(order, dtype=torch.int64, device=self.device), found)

    def require_ids(self, ids: Sequence[Sequence[int]]) -> None:
        """Raise RangeError for a text without tokens or with too many, or an unknown token."""
        size = self._model.config.vocab_size
        for row in ids:
            if not 0 < len(row) <= self.max_tokens:
                raise RangeError(f"a text has 1 to {self.max_tokens:,} tokens, got {len(row):,}")
            if set(map(type, row)) != {int}:  # a float would be cut to an integer
                try:
                    list(map(operator.index, row))
                except TypeError as error:
                    raise RangeError(f"ids are integers: {error}") from None
            if min(row) < 0 or max(row) >= size:
                raise RangeError(f"ids are 0 to {size - 1:,}, got {min(row) if min(row) < 0 else max(row):,}")


def _batches(lengths: Sequence[int], most: int = 8192) -> Iterator[list[int]]:
    """Yield the indices of texts, similar lengths together, at most so many tokens or one text at once."""
    batch: list[int] = []
    total = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and total + lengths[row] > most:
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += lengths[row]
    if batch:
        yield batch


def _pools_mean(folder: Path) -> bool:
    """Return whether a folder's vectors are means, rather than first tokens; UnsupportedCase for others."""
    modules = folder / "modules.json"
    if modules.is_file():
        try:
            listed = decode_json(read_regular(modules))
        except ValueError as error:
            raise FormatError(f"{modules} is not valid JSON: {clipped(str(error))}") from None
        if not isinstance(listed, list):
            raise FormatError(f"{modules} must hold a list, got {clipped(listed)}")
        kinds = [str(one.get("type")).rpartition(".")[2] if isinstance(one, dict) else "?" for one in listed]
        if further := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
            raise UnsupportedCase(f"{modules} has the layer {clipped(further[0])}: supported are Pooling and Normalize")
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return True
    fields = read_object(path)
    modes = {name.removeprefix("pooling_mode_") for name, on in fields.items() if on is True and "_mode_" in name}
    if isinstance(mode := fields.get("pooling_mode"), str):  # of sentence-transformers from 5.2 on
        modes.add({"mean": "mean_tokens", "cls": "cls_token"}.get(mode, mode))
    if modes not in ({"mean_tokens"}, {"cls_token"}):
        raise UnsupportedCase(f"{path}: pooling must be the mean or the first token, got {', '.join(sorted(modes))}")
    return modes == {"mean_tokens"}
