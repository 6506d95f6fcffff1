"""Hugging Face models on Accelerant's ops, in place; see patch and unpatch. They import transformers when called."""

from accelerant.nn._patch.api import patch, unpatch
from accelerant.nn._patch.record import Changed, LeftAlone, PatchReport

__all__ = ["Changed", "LeftAlone", "PatchReport", "patch", "unpatch"]
