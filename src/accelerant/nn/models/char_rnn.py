# ruff: noqa: D102  methods without a docstring are documented in LanguageModel
"""CharRNN: a recurrent language model, an embedding, LSTM or GRU layers, and an output layer.

logits = head(layers(wte[tokens]))

It has few weights and no attention, so it learns short texts of bytes quickly on a CPU.

Source: Graves 2013, "Generating sequences with recurrent neural networks", arXiv:1308.0850, without skip connections.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError
from accelerant.nn.layers import GRU, LSTM, Linear, has_hooks
from accelerant.nn.models.language_model import Cache, LanguageModel, ModelConfig, require_tokens

_CELLS: dict[str, type[LSTM] | type[GRU]] = {"lstm": LSTM, "gru": GRU}


@dataclass(frozen=True, slots=True)
class CharRNNConfig(ModelConfig):
    """The dimensions of a CharRNN.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        context: longest sequence, in tokens. The state is zero at its beginning.
        layers: number of recurrent layers.
        width: features of the embedding and of each layer's state.
        cell: kind of the layers, "lstm" or "gru".
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 1
    width: int = 256
    cell: Literal["lstm", "gru"] = "lstm"

    def __post_init__(self) -> None:
        self.require_positive("vocab_size", "context", "layers", "width")
        if self.cell not in _CELLS:
            raise ConfigError(f"CharRNNConfig.cell must be {' or '.join(_CELLS)}, got {self.cell!r}")


class CharRNN(LanguageModel):
    """A recurrent language model. It has no format of Hugging Face's; save its state_dict and its config."""

    config: CharRNNConfig

    def __init__(self, config: CharRNNConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.rnn = _CELLS[config.cell](config.width, config.width, config.layers, batch_first=True)
        self.head = Linear(config.width, config.vocab_size)

    def hidden(self, idx: Tensor) -> Tensor:
        require_tokens(idx, self.config.context)
        return self._run(idx)[0]

    def _run(self, idx: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the features (B, T, width) of tokens (B, T), and the final states (layers, B, width)."""
        y, state = self.rnn(self.wte(idx))
        return y, state if isinstance(state, tuple) else (state,)

    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(idx))
        return logits

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._require_targets(idx, targets)
        return ops.cross_entropy(self(idx).flatten(0, 1), targets.flatten().long())

    # --- decoding: the state of a layer is its entry of the cache, h as the only key and c as the only value ---------
    def can_cache(self) -> bool:
        return not any(map(has_hooks, (self.wte, self.rnn, self.head))) and type(self.rnn) in _CELLS.values()

    def cache_shape(self) -> tuple[int, int, int]:
        return self.config.layers, 1, self.config.width

    def activation_dtype(self) -> torch.dtype:
        return self.wte.weight.dtype

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        y, states = self._run(idx)
        if cache is not None:
            for layers, state in zip((cache.k, cache.v), states, strict=False):
                for entry, value in zip(layers, state, strict=True):
                    entry[:, 0, 0] = value
        return self._next_logits(y[:, -1])

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        x = self.wte(tokens)
        for layer, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
            weights = [
                getattr(self.rnn, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            h, c = k[:, 0, 0], v[:, 0, 0]
            with torch.autocast(x.device.type, enabled=False):  # as the layer itself, in the parameters' dtype
                if self.config.cell == "lstm":
                    x, cell = torch.lstm_cell(x, (h, c), *weights)
                    c.copy_(cell)
                else:
                    x = torch.gru_cell(x, h, *weights)
            h.copy_(x)
        return self._next_logits(x)

    def _next_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits.float()
