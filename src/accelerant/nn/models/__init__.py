"""Whole models."""

from accelerant.nn.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
