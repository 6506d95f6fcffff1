"""Whole models."""

from accelerant.nn.models.gpt import GPT, GPTConfig
from accelerant.nn.models.llama import Llama, LlamaConfig

__all__ = ["GPT", "GPTConfig", "Llama", "LlamaConfig"]
