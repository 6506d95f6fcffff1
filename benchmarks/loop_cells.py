"""Model families of transformers and the loops that users run them in: the cells of benchmarks.loops.

A family is a class with a config, a loop a generator of ordinary code that yields what each step computed. `Running`
has what the loop works with: a model as one of the runners takes it, and batches that are the same for all of them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.bench.record import COMPILED, EAGER, OURS
from accelerant.nn import PatchReport, patch

__all__ = ["DYNAMIC", "FAMILIES", "LOOPS", "RUNNERS", "TORCH", "Cell", "Family", "Loop", "Running", "move", "running"]

TORCH, DYNAMIC = "torch", "torch.compile, dynamic"
RUNNERS = {"torch": TORCH, "patched": OURS, "patched-compiled": COMPILED, "compile": DYNAMIC, "eager": EAGER}
"""Runners by their names in --runner: the model as it was, patched, patched and compiled, under torch.compile for
varying sizes, and patched without CUDA graphs.
"""

_LEARNING_RATE, _CLIP = 1e-3, 1.0
_MICRO_BATCHES, _EVALUATED = 4, 4
"""Batches of an optimizer's step with accumulation; training steps before an evaluation."""

_LENGTHS = (0.4, 1.95)
"""Lengths that vary are drawn between these multiples of a family's tokens: 256 gives 102 to 499."""

_NEW_TOKENS, _LARGE_BATCHES = 64, 8
_FIRST_ID = 3  # ids below are those of padding, begin and end


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        kind: the class's name in transformers.
        config: arguments of its config on a GPU; on a CPU those that `_TINY` names have its values.
        task: "causal", "masked", "sequences" (from one to another), "speech", "image", or "pairs" of texts and images.
        batch, tokens: sequences (or images) of a batch and their length.
        dropouts: the config's names of its dropouts: 0 in all loops but "dropout".
        only: the loops of a family that is here for its size.
    """

    kind: str
    config: dict[str, Any]
    task: str = "causal"
    batch: int = 8
    tokens: int = 256
    dropouts: tuple[str, ...] = ("attention_dropout",)
    only: tuple[str, ...] = ()


_TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32), **dict.fromkeys(("intermediate_size", "d_ff"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4), "vocab_size": 128, "num_key_value_heads": 2,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4), "projection_dim": 16,
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64), **dict.fromkeys(("head_dim", "d_kv"), 8),
    "query_pre_attn_scalar": 8, "sliding_window": 8, "local_attention": 8, "global_attn_every_n_layers": 2,
    "image_size": 16, "patch_size": 4, "num_labels": 10, "num_mel_bins": 8, "max_source_positions": 12,
}  # fmt: skip


def _decoder(width: int = 768, layers: int = 6, inner: int = 2048, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 32000, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def _encoder(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12, **more,
    }  # fmt: skip


_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 4096}
_BERT = {"vocab_size": 30522, "max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_GPT2 = {
    "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SPEECH = {
    "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "num_mel_bins": 80,
    "max_source_positions": 1500, "max_target_positions": 512, "vocab_size": 51865, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": [],
    "begin_suppress_tokens": [],
}  # fmt: skip
_PAIRS = {
    "text_config": _encoder(
        hidden_size=512, intermediate_size=2048, num_attention_heads=8, vocab_size=49408, max_position_embeddings=77,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, projection_dim=512,
    ),
    "vision_config": _encoder(image_size=224, patch_size=32, projection_dim=512),
    "projection_dim": 512,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", _GPT2, dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "llama": Family("LlamaForCausalLM", _decoder()),
    "qwen2": Family("Qwen2ForCausalLM", _decoder()),
    "qwen3": Family("Qwen3ForCausalLM", _decoder(head_dim=64)),
    "mistral": Family("MistralForCausalLM", _decoder(sliding_window=4096)),
    "gemma2": Family("Gemma2ForCausalLM", _decoder(**_GEMMA)),
    "gemma3": Family("Gemma3ForCausalLM", _decoder(**_GEMMA)),
    "phi3": Family("Phi3ForCausalLM", _decoder(), dropouts=("resid_pdrop", "embd_pdrop", "attention_dropout")),
    "mixtral": Family(
        "MixtralForCausalLM",
        _decoder(inner=1024, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    ),
    "bert": Family("BertForMaskedLM", _encoder(**_BERT), "masked", dropouts=_BERT_DROPOUTS),
    "roberta": Family("RobertaForMaskedLM", _encoder(**_BERT), "masked", dropouts=_BERT_DROPOUTS),
    "modernbert": Family(
        "ModernBertForMaskedLM", _encoder(
            intermediate_size=1152, vocab_size=50368, local_attention=128, global_attn_every_n_layers=3,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        ), "masked", dropouts=("embedding_dropout", "mlp_dropout", "attention_dropout"),
    ),
    "t5": Family(
        "T5ForConditionalGeneration", {
            "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
            "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
        }, "sequences", dropouts=("dropout_rate",),
    ),
    "whisper": Family("WhisperForConditionalGeneration", _SPEECH, "speech", dropouts=("dropout",)),
    "vit": Family(
        "ViTForImageClassification", _encoder(image_size=224, patch_size=16, num_labels=1000), "image", batch=32,
        dropouts=_BERT_DROPOUTS,
    ),
    "clip": Family("CLIPModel", _PAIRS, "pairs", batch=32, tokens=39, dropouts=()),
    "gemma2-1024": Family("Gemma2ForCausalLM", _decoder(1024, 8, **_GEMMA), batch=2, tokens=512, only=("fixed",)),
    "llama-1b": Family(
        "LlamaForCausalLM",
        _decoder(2048, 16, 8192, vocab_size=128256, num_key_value_heads=8, tie_word_embeddings=True),
        batch=4, tokens=2048, only=("bf16-weights",),
    ),
}  # fmt: skip


# --- loops -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Running:
    """A runner's model in a loop.

    Attributes:
        model: the model itself, for its parameters and modes; `call` is what the loop calls.
        batches: batches on the host, which the loop repeats; `at` is the number of those that it has taken.
        low: the dtype of autocast; None without.
        report: what patch did; None of other runners.
        graded: called after the backward passes of a step, before its gradients are clipped.
    """

    model: Any
    call: Callable[..., Any]
    batches: Sequence[dict[str, Any]]
    where: torch.device
    low: torch.dtype | None
    report: PatchReport | None = None
    at: int = 0
    graded: Callable[[], None] = lambda: None

    def batch(self) -> dict[str, Any]:
        """Return the next batch on the device, its floats in the dtype of the weights."""
        dtype, batch = next(self.model.parameters()).dtype, self.batches[self.at % len(self.batches)]
        self.at += 1

        def moved(x: Any) -> Any:
            return x.to(self.where, dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x

        return {name: moved(x) for name, x in batch.items()}

    def loss(self) -> Tensor:
        """Return the loss of the next batch."""
        with torch.autocast(self.where.type, self.low, enabled=self.low is not None):
            loss: Tensor = self.call(**self.batch()).loss
        return loss


def _training(this: Running, micro_batches: int = 1) -> Iterator[Tensor]:
    """Yield the loss of each step."""
    parameters = [parameter for parameter in this.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE)
    while True:
        losses = []
        for _ in range(micro_batches):
            loss = this.loss() / micro_batches
            loss.backward()
            losses.append(loss.detach())
        this.graded()
        nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield torch.stack(losses).sum()


def _evaluating(this: Running) -> Iterator[Tensor]:
    """Yield the losses of training steps, and after some of them that of an evaluation."""
    training = _training(this)
    while True:
        for _ in range(_EVALUATED):
            yield next(training)
        this.model.eval()
        with torch.no_grad():
            loss = this.loss()
        this.model.train()
        yield loss


@torch.no_grad()
def _tokens(this: Running) -> Tensor:
    prompt = {name: x[:1] for name, x in this.batch().items() if name in ("input_ids", "input_features")}
    found = this.model.generate(**prompt, do_sample=False, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS)
    tokens: Tensor = found[:, -_NEW_TOKENS:]
    return tokens


def _generating(this: Running) -> Iterator[Tensor]:
    """Yield the tokens that follow a prompt, greedily."""
    this.model.eval()
    while True:
        yield _tokens(this)


@torch.no_grad()
def _mean_states(this: Running) -> Tensor:
    batch = {name: x for name, x in this.batch().items() if name != "labels"}
    with torch.autocast(this.where.type, this.low, enabled=this.low is not None):
        states = this.call(**batch).last_hidden_state
    mask = batch["attention_mask"].to(states.dtype)
    means: Tensor = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return means


def _embedding(this: Running) -> Iterator[Tensor]:
    """Yield the mean of each text's last states."""
    this.model.eval()
    while True:
        yield _mean_states(this)


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def _adapted(model: Any) -> Any:
    peft = importlib.import_module("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))


def _frozen(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop.

    Attributes:
        steps: yields what each step computed: losses, embeddings or tokens.
        prepare: changes the model before a runner takes it.
        varies: whether each batch has a length of its own.
        pads: the side on which shorter texts of a batch are padded; "" for none.
        tasks: of the families that it runs with, and `without` the reason for others.
        share: the share of the usual steps that it makes, where they are long.
        trains: whether its steps change the weights.
    """

    steps: Callable[[Running], Iterator[Tensor]] = _training
    prepare: Callable[[Any], Any] = lambda model: model
    varies: bool = False
    pads: str = ""
    tasks: tuple[str, ...] = ("causal", "masked", "sequences", "speech", "image", "pairs")
    without: str = ""
    share: float = 1.0
    trains: bool = True


_TEXTS = ("causal", "masked", "sequences", "speech", "pairs")
_ONE_SIZE = "has images of one size"

LOOPS: dict[str, Loop] = {
    "fixed": Loop(),
    "varying": Loop(varies=True, tasks=_TEXTS, without=_ONE_SIZE),
    "padded-right": Loop(varies=True, pads="right", tasks=_TEXTS, without=_ONE_SIZE),
    "padded-left": Loop(
        varies=True, pads="left", tasks=("causal", "masked", "sequences"), without="has inputs padded on the right"
    ),
    "packed": Loop(tasks=("causal",), without="tells sequences apart by a mask"),
    "accumulation": Loop(functools.partial(_training, micro_batches=_MICRO_BATCHES), share=0.5),
    "checkpointing": Loop(prepare=_checkpointed),
    "lora": Loop(prepare=_adapted),
    "frozen-embedding": Loop(prepare=_frozen, tasks=_TEXTS, without="embeds patches by a convolution"),
    "bf16-weights": Loop(),
    "dropout": Loop(),
    "evaluation": Loop(_evaluating),
    "generate": Loop(
        _generating, tasks=("causal", "sequences", "speech"), without="generates no text", share=0.125, trains=False
    ),
    "embedding": Loop(
        _embedding, lambda model: model.base_model, varies=True, pads="right", tasks=("causal", "masked"),
        without="embeds no texts", trains=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A family in a loop, on a GPU or tiny."""

    family: str
    loop: str
    gpu: bool
    model: Family = field(init=False)
    how: Loop = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", FAMILIES[self.family])
        object.__setattr__(self, "how", LOOPS[self.loop])

    @property
    def left_out(self) -> str:
        """Why the family has no such loop; "" if it has."""
        if self.model.only and self.loop not in self.model.only:
            return f"is here for {', '.join(self.model.only)}"
        if self.loop == "dropout" and not self.model.dropouts:
            return "has no dropout"
        return "" if self.model.task in self.how.tasks else self.how.without

    @property
    def sizes(self) -> tuple[int, int]:
        """Sequences of a batch and their tokens."""
        return (self.model.batch, self.model.tokens) if self.gpu else (2, 16)

    @property
    def key(self) -> str:
        """The family and the label."""
        return f"{self.family} {self.label}"

    @property
    def label(self) -> str:
        """The loop with its sizes."""
        batch, tokens = self.sizes
        if self.model.task == "image":
            return f"{self.loop}, {batch} images"
        if self.loop == "generate":
            return f"{self.loop}, {_NEW_TOKENS} tokens"
        if self.loop == "packed":
            return f"{self.loop}, 1 x {batch * tokens}"
        return f"{self.loop}, {batch} x " + ("{}-{}".format(*self._lengths()) if self.how.varies else f"{tokens}")

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of autocast; None without, as on a CPU."""
        return torch.bfloat16 if self.gpu and not self.bfloat16 else None

    @property
    def bfloat16(self) -> bool:
        """Whether the weights are in bfloat16; a CPU's tokens are compared in float32, where few of them tie."""
        return self.loop == "bf16-weights" or (self.loop == "generate" and self.gpu)

    def _lengths(self) -> tuple[int, int]:
        low, high = (int(factor * self.sizes[1]) for factor in _LENGTHS)
        return low, high

    def config(self) -> dict[str, Any]:
        """Return the arguments of the model's config."""

        def tiny(config: dict[str, Any]) -> dict[str, Any]:
            return {
                name: tiny(value) if isinstance(value, dict) else _TINY.get(name, value)
                for name, value in config.items()
            }

        dropouts = dict.fromkeys(self.model.dropouts, 0.1 if self.loop == "dropout" else 0.0)
        return (self.model.config if self.gpu else tiny(self.model.config)) | dropouts

    def batches(self, count: int) -> list[dict[str, Any]]:
        """Draw batches on the host, which a loop repeats; of images and speech a few, as they are large."""
        large = self.model.task in ("image", "speech", "pairs")
        return [self._batch(number) for number in range(min(count, _LARGE_BATCHES) if large else count)]

    def _batch(self, number: int) -> dict[str, Any]:
        """Draw a batch: the same one for the same number."""
        generator = torch.Generator().manual_seed(number)
        config, (rows, tokens), task = self.config(), self.sizes, self.model.task
        low, high = self._lengths()
        draw = functools.partial(torch.randint, generator=generator)
        pixels = config.get("vision_config", config).get("image_size")
        images = {"pixel_values": torch.randn(rows, 3, pixels, pixels, generator=generator)} if pixels else {}
        if task == "image":
            return images | {"labels": draw(config["num_labels"], (rows,))}
        if self.loop == "packed":
            rows, tokens = 1, rows * tokens
        length = int(draw(low, high + 1, ())) if self.how.varies else tokens
        text = config.get("text_config", config)
        ids = draw(_FIRST_ID, text["vocab_size"], (rows, length))
        labels = ids.clone()
        if task == "masked":
            chosen = torch.rand(ids.shape, generator=generator) < 0.15
            chosen[:, 0] = True
            labels[~chosen] = -100
        batch: dict[str, Any] = {"input_ids": ids}
        if self.how.pads:
            kept = draw(min(low, length), length + 1, (rows,)).index_fill(0, torch.tensor(0), length)
            places = torch.arange(length) if self.how.pads == "right" else torch.arange(length - 1, -1, -1)
            mask = places < kept[:, None]
            ids[~mask], labels[~mask] = text.get("pad_token_id", 0), -100
            batch["attention_mask"] = mask.long()
        if self.loop == "packed":
            begins = torch.rand(length, generator=generator) < 4 / self.sizes[1]
            begins[0] = True
            starts = torch.where(begins, torch.arange(length), 0).cummax(0).values
            labels[0, begins] = -100
            batch["position_ids"] = (torch.arange(length) - starts)[None]
        if task == "pairs":
            return batch | images | {"return_loss": True}
        if task == "speech":
            frames = 2 * config["max_source_positions"]
            features = torch.randn(rows, config["num_mel_bins"], frames, generator=generator)
            return {"input_features": features, "labels": labels}
        return batch | {"labels": labels[:, : max(1, length // 2)].contiguous() if task == "sequences" else labels}


# --- runners ---------------------------------------------------------------------------------------------------------


def _add_noise(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def move(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move each weight by at most half a unit in the last place of a dtype, as another rounding would."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator, device=parameter.device) - 0.5
            parameter.mul_(1 + torch.finfo(dtype).eps * noise)


def running(
    cell: Cell, runner: str, where: torch.device, batches: Sequence[dict[str, Any]], *, moved: int = 0
) -> Running:  # fmt: skip
    """Return a runner's model, from the same weights and seeds each time.

    With a seed `moved` the weights are rounded differently, and dropout draws other numbers.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    kind = getattr(transformers, cell.model.kind)
    torch.manual_seed(0)
    with torch.device(where):
        model = kind(kind.config_class(**cell.config()))
    if not cell.gpu:  # a narrow model's weights are too small to matter
        _add_noise(model)
    model = cell.how.prepare(model.to(torch.bfloat16 if cell.bfloat16 else torch.float32).train())
    if moved:
        move(model, cell.low or next(model.parameters()).dtype, moved)
    call, report = model, None
    if runner.startswith(OURS):
        report = patch(model, graph=False if runner == EAGER else None)
    if runner in (COMPILED, DYNAMIC):
        call = torch.compile(model.forward if cell.loop == "generate" else model, dynamic=True)
        if cell.loop == "generate":
            model.forward = call
    torch.manual_seed(moved)
    return Running(model, call, batches, where, cell.low, report)
