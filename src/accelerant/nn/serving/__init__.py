"""Serving of language models: many requests through one model, batched as they come."""

from accelerant.nn.models.language_model import Sampling
from accelerant.nn.serving.engine import Answer, Engine, Finished, PromptLogprobs, Token, Usage

__all__ = ["Answer", "Engine", "Finished", "PromptLogprobs", "Sampling", "Token", "Usage"]
