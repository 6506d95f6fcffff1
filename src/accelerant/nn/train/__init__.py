"""Training a GPT on text: presets, data, loop, checkpoints, report.

`run_training` does a whole run and leaves a folder with everything in it; `accelerant train` is its command.
"""

from accelerant.nn.train.checkpoint import load_checkpoint, save_checkpoint
from accelerant.nn.train.corpus import Corpus, Document, load_corpus
from accelerant.nn.train.job import Outcome, Progress, resume_training, run_training
from accelerant.nn.train.presets import PRESETS, Recipe, RunConfig, preset

__all__ = [
    "PRESETS",
    "Corpus",
    "Document",
    "Outcome",
    "Progress",
    "Recipe",
    "RunConfig",
    "load_checkpoint",
    "load_corpus",
    "preset",
    "resume_training",
    "run_training",
    "save_checkpoint",
]
