"""Whole models."""

from accelerant.nn.models.char_rnn import CharRNN, CharRNNConfig
from accelerant.nn.models.gpt import GPT, GPTConfig
from accelerant.nn.models.llama import Llama, LlamaConfig

__all__ = ["GPT", "CharRNN", "CharRNNConfig", "GPTConfig", "Llama", "LlamaConfig"]
