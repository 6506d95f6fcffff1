"""The tokenizer of a model's folder, its template of conversations, and text by the model with its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase
from accelerant.nn.models.hugging_face import Fields, is_run, read_object
from accelerant.runtime.bounded_template import BoundedTemplate
from accelerant.runtime.files import clipped, decode_json, read_regular, reason_of

if TYPE_CHECKING:
    from accelerant.nn.models.language_model import LanguageModel
    from accelerant.nn.train.tokens import Tokenizer

_MOST_BYTES = 1 << 28
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_PIECES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}
"""How byte-level BPE writes bytes in its vocabulary: itself if printable, else above 255."""
_MOST_HELD = 64  # tokens without a complete character after which the text so far is emitted


class ModelTokenizer:
    """The tokenizer of a folder in Hugging Face's format, as transformers reads it.

    tokenizer.json, or vocab.json and merges.txt of a byte-level BPE; the chat template of chat_template.jinja or
    tokenizer_config.json, rendered in a sandbox within a second.

    `given` replaces the fields of config.json, and has the chat template where those files have none.

    Attributes:
        size: number of tokens.
        eos_ids: tokens that end a text: those of generation_config.json, else config.json, else tokenizer_config.json.
        bos_id: the token that begins a text, or None.

    Raises:
        FormatError: a file is missing or malformed; it is named.
    """

    def __init__(self, folder: Path | str, given: Fields | None = None) -> None:
        self.folder = Path(folder)
        self._inner = read_tokenizer(self.folder)
        self.size = int(self._inner.get_vocab_size())
        settings = self._object("tokenizer_config.json")
        self._special = {
            name: content
            for name, value in {**self._object("special_tokens_map.json"), **settings}.items()
            if name.endswith("_token") and isinstance(content := _content(value), str)
        }
        config = Fields(self._object("config.json"), "config.json") if given is None else given
        ends = [each.get("eos_token_id") for each in (self._object("generation_config.json"), config)]
        ends.append(self._id("eos_token"))
        found: Any = next((end for end in ends if end is not None), ())
        self.eos_ids = tuple(end for end in (found if isinstance(found, list | tuple) else (found,)) if _is_id(end))
        begin = self._id("bos_token")
        self.bos_id = begin if begin is not None else next(filter(_is_id, (config.get("bos_token_id"),)), None)
        template = None if given is None else given.get("chat_template")
        self._template = self._chat_template({"chat_template": template, **settings})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with those that begin a text unless `special` is False.

        Raises ConfigError for half of a surrogate pair, which is no character, and FormatError if the tokenizer fails.
        """
        try:
            return list(self._inner.encode(text, add_special_tokens=special).ids)
        except (UnicodeEncodeError, TypeError):
            raise ConfigError(f"not a text of Unicode characters: {clipped(text)}") from None
        except BaseException as error:  # noqa: BLE001  a panic is no Exception
            raise self._named(error) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones; FormatError if the tokenizer fails."""
        try:
            return str(self._inner.decode(list(ids), skip_special_tokens=True))
        except BaseException as error:  # noqa: BLE001  a panic is no Exception
            raise self._named(error) from None

    def token_text(self, token: int) -> str:
        r"""Return the text of one token, as "<s>" for a special one; "bytes:\xe2" for a part of a character."""
        text = self.decode([token])
        if text and "\ufffd" not in text:
            return text
        piece = str(self._inner.id_to_token(token) or "")
        if _BYTE_PIECE.fullmatch(piece):
            return f"bytes:\\x{piece[3:5].lower()}"
        if text and all(char in BYTE_PIECES for char in piece):
            return "bytes:" + "".join(f"\\x{BYTE_PIECES[char]:02x}" for char in piece)
        return piece

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return the tokens of a conversation; arguments and errors as for `chat_text`."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, special=False)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text of a conversation by the folder's chat template.

        Args:
            messages: each with "role" and "content", and what else the template reads.
            add_generation_prompt: whether to begin the assistant's answer.
            variables: further values of the template, those of JSON.

        Raises:
            UnsupportedCase: the folder has no chat template.
            ConfigError: the template refuses the messages.
            FormatError: the template is malformed, reads files or needs too much memory.
            TimeLimitExceeded: it does not end within a second.
        """
        if self._template is None:
            raise UnsupportedCase(
                f"{self.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "give a prompt as text"
            )
        values = {"tools": None, "documents": None, **self._special, **variables}
        return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **values)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` has a template."""
        return self._template is not None

    def stream(self) -> TextStream:
        """Return a decoder of tokens that come one by one."""
        return TextStream(self)

    def _named(self, error: BaseException) -> BaseException:
        """Return the error to raise for one from the library, whose own are bare Exceptions and panics."""
        if type(error) is Exception or type(error).__name__ == "PanicException":
            return FormatError(f"the tokenizer of {self.folder} fails: {clipped(str(error), 300)}")
        return error

    def _id(self, name: str) -> int | None:
        return None if name not in self._special else self._inner.token_to_id(self._special[name])

    def _object(self, name: str) -> dict[str, Any]:
        return read_object(self.folder / name) if (self.folder / name).is_file() else {}

    def _chat_template(self, settings: Mapping[str, Any]) -> BoundedTemplate | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            try:
                return BoundedTemplate(read_regular(path).decode(), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise FormatError(f"cannot read {path}: {reason_of(error)}") from None
        template = settings.get("chat_template")
        if isinstance(template, list):  # several by name
            named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if template is None:
            return None
        origin = f"chat_template of {self.folder / 'tokenizer_config.json'}"
        if not isinstance(template, str):
            raise FormatError(f"{origin} must be a text, got {clipped(template)}")
        return BoundedTemplate(template, origin)


class TextStream:
    """Decodes tokens one by one; the parts together are what `decode` gives for all of them.

    A character whose bytes are not all there yet is held back, but at most 64 tokens.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens of which text was emitted, then those that are held back
        self._emitted = 0  # of these tokens

    def push(self, token: int) -> str:
        """Return the text that a token completes, perhaps none."""
        self._ids.append(token)
        if len(self._ids) - self._emitted < _MOST_HELD and self._new().endswith("\ufffd"):
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return the text that was held back."""
        text = self._new()
        if text:  # tokens without text stay in front of the next, whose spaces depend on what is before
            self._ids = self._ids[self._emitted :]
            self._emitted = len(self._ids)
        elif len(self._ids) - self._emitted >= _MOST_HELD:
            del self._ids[self._emitted :]
        return text

    def _new(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._emitted])
        return self._tokenizer.decode(self._ids)[len(before) :]


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, an object of the package tokenizers; FormatError if there is none."""
    import tokenizers

    path, parts = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    try:
        if path.is_file():
            text = read_regular(path, _MOST_BYTES).decode()
            if not isinstance(decode_json(text), dict):
                raise ValueError("it must hold an object")
            found: Any = tokenizers.Tokenizer.from_str(text)
        elif all(part.is_file() for part in parts):
            found = tokenizers.ByteLevelBPETokenizer(*map(str, parts))
        else:
            raise FileNotFoundError("there is none")
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise FormatError(
            f"cannot read the tokenizer {path}: {str(error)[:300]}; write it with transformers: "
            f"AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
        ) from None
    found.no_truncation()  # a file may ask for what was useful in its training
    found.no_padding()
    return found


def _content(token: Any) -> Any:
    """Return the text of a special token, which is a text or an object that has it."""
    return token.get("content") if isinstance(token, dict) else token


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
