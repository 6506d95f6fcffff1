"""Training: of any module (`Trainer`, `fit`), and of a GPT on text (`run_training`, the command `accelerant train`).

`run_training` does a whole run and leaves a folder with everything in it. Both share one loop.
"""

from typing import TYPE_CHECKING

from accelerant._renamed import renamed_names
from accelerant.nn.train.callbacks import Callback, PrintProgress, TensorBoard
from accelerant.nn.train.checkpoint import load_checkpoint, save_checkpoint
from accelerant.nn.train.config import PRESETS, RunConfig, TrainConfig, preset
from accelerant.nn.train.corpus import Corpus, load_corpus, prepare_tokens
from accelerant.nn.train.history import History, StepRecord
from accelerant.nn.train.job import Progress, TrainingOutcome, export_run, load_run, resume_training, run_training
from accelerant.nn.train.objective import Evaluation, accuracy
from accelerant.nn.train.step import StepResult, TrainStep
from accelerant.nn.train.tokens import Document, TokenFile
from accelerant.nn.train.trainer import Trainer, fit

__all__ = [
    "PRESETS", "Callback", "Corpus", "Document", "Evaluation", "History", "PrintProgress", "Progress", "RunConfig",
    "StepRecord", "StepResult", "TensorBoard", "TokenFile", "TrainConfig", "TrainStep", "Trainer", "TrainingOutcome",
    "accuracy", "export_run", "fit", "load_checkpoint", "load_corpus", "load_run", "prepare_tokens", "preset",
    "resume_training", "run_training", "save_checkpoint",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(__name__, {"Outcome": "accelerant.nn.train.TrainingOutcome"})
