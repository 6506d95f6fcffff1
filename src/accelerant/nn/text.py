"""Text by a trained model: the model on its device, its tokenizer, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerant.errors import FormatError, MissingFile
from accelerant.nn.models.hugging_face import is_run, read_object
from accelerant.nn.models.tokenizer import ModelTokenizer
from accelerant.runtime.files import clipped

if TYPE_CHECKING:
    from accelerant.nn.models.language_model import LanguageModel
    from accelerant.nn.train.tokens import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """A model on its device, its tokenizer, and the tokens that end a text.

    Attributes:
        threads: maximum number on the CPU; None for torch's.
        start: tokens that begin a text without a prompt.
    """

    model: LanguageModel
    tokenizer: Tokenizer | ModelTokenizer
    device: torch.device
    stops: tuple[int, ...]
    start: tuple[int, ...]
    threads: int | None = None

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt; raise FormatError if the model does not have them."""
        tokenizer = self.tokenizer
        ids = tokenizer.encode(text) if isinstance(tokenizer, ModelTokenizer) else tokenizer.encode_text(text)
        ids = ids or list(self.start)
        size = self.model.config.vocab_size
        if ids and max(ids) >= size:
            raise FormatError(f"the tokenizer gives token {max(ids):,}, but the model has {size:,} tokens")
        return ids

    def generate(self, ids: list[int], tokens: int, **options: Any) -> list[int]:
        """Return the tokens of the prompt and its continuation."""
        from accelerant.nn.train.config import TrainConfig
        from accelerant.nn.train.environment import numerics
        from accelerant.nn.train.objective import autocast, precision_of

        given = torch.tensor([ids], device=self.device)
        precision = precision_of(TrainConfig(), self.device)
        with numerics(deterministic=False, cpu_threads=self.threads), autocast(self.device, precision):
            return list(self.model.generate(given, tokens, stop=self.stops, **options)[0].tolist())

    def text(self, tokens: Sequence[int], given: int) -> str:
        """Return the text after the first `given` tokens, without what ends it."""
        new = list(tokens[given:])
        ends = [index for index, token in enumerate(new) if token in self.stops]
        new = new[: ends[0]] if ends else new
        # Some decoders drop a space at the beginning of a text, which the new one is not.
        before, whole = self.tokenizer.decode(tokens[:given]), self.tokenizer.decode([*tokens[:given], *new])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)


def load_text_model(folder: Path, device: torch.device) -> TextModel:
    """Load the model of a run's folder, or of one of Hugging Face's format, with its tokenizer.

    Raises ConfigError or FormatError if there is none.
    """
    from accelerant.nn import GPT, Llama

    if not folder.is_dir():
        raise MissingFile(f"no folder {folder}: name a run's, or one with config.json and model.safetensors")
    if not (folder / "config.json").is_file():
        raise FormatError(f"{folder} holds no model: there is no config.json")
    config = read_object(folder / "config.json")
    if is_run(folder):
        from accelerant.nn.train import load_run
        from accelerant.nn.train.config import RunConfig

        model, tokenizer = load_run(folder, device)
        end = tokenizer.end
        threads = RunConfig.from_dict(config.get("run")).cpu_threads  # type: ignore[arg-type]  # it raises for others
        start = tokenizer.encode_text("\n") if end is None else [end]
        return TextModel(model, tokenizer, device, () if end is None else (end,), tuple(start), threads)
    kind = config.get("model_type")
    kinds: dict[str, type[LanguageModel]] = {layout.model_type: cls for cls in (GPT, Llama) for layout in cls._layouts}
    if not isinstance(kind, str) or kind not in kinds:
        raise FormatError(f"{folder / 'config.json'}: model_type must be {' or '.join(kinds)}, got {clipped(kind)}")
    hub = ModelTokenizer(folder)
    loaded = kinds[kind].from_pretrained(folder, device=device)
    stops = tuple(token for token in hub.eos_ids if token < loaded.config.vocab_size)
    begin = [token for token in (hub.bos_id, *stops) if token is not None and token < loaded.config.vocab_size]
    return TextModel(loaded, hub, device, stops, tuple(begin[:1] or hub.encode("\n")))
