"""Models of Hugging Face and of torch.nn's layers on Accelerant's ops, in place; see patch and unpatch."""

from accelerant.nn.patching.api import patch, unpatch
from accelerant.nn.patching.forms import register_form
from accelerant.nn.patching.record import Changed, LeftAlone, PatchReport

__all__ = ["Changed", "LeftAlone", "PatchReport", "patch", "register_form", "unpatch"]
