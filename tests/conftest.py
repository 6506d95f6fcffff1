"""What every test stands on: the Triton interpreter where there is no GPU, a cache of its own, the gpu marker."""

import gc
import importlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import accelerant.ops

HAS_GPU = torch.cuda.is_available()

# Each process (each worker of xdist) has its own cache, so that no test sees another run's kernels or tokenisers.
_CACHE = tempfile.mkdtemp(prefix="accelerant-test-")
os.environ["ACCELERANT_CACHE_DIR"] = _CACHE

if not HAS_GPU and "TRITON_INTERPRET" not in os.environ:
    # Triton decides between compiler and interpreter when a function is decorated, its own library's included: so the
    # variable must stand while triton and our kernels are first imported. Afterwards only the tests of ops set it
    # again (their conftest), since a training run through the interpreter would take hours.
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for path in Path(accelerant.ops.__path__[0]).glob("*/triton_kernels.py"):
            importlib.import_module(f"accelerant.ops.{path.parent.name}.triton_kernels")
        importlib.import_module("quick_interpreter").make_quick()
    except ImportError:  # no wheel for this system: the tests that need it skip
        pass
    finally:
        del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items):
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    # Thousands of collected tests are millions of objects that live to the end: without this each full garbage
    # collection, of which tests ask for many, walks them for a second.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    shutil.rmtree(_CACHE, ignore_errors=True)
