"""Set-up of every test: the Triton interpreter where there is no GPU, a cache of the run's own, the gpu marker."""

import gc

gc.disable()  # until all is collected: what is imported and collected lives on, and a third of the time went to walk it

# ruff: noqa: E402
import atexit
import functools
import importlib.util
import inspect
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

import accelerant.ops

pytest_plugins = ["soak"]

HAS_GPU = torch.cuda.is_available()

# A run has a cache of its own, which its workers share (they inherit the variable), so that no test sees another run's
# kernels or tokenizers and a kernel is compiled once.
_CACHE = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="accelerant-test-")
if _CACHE:
    os.environ["ACCELERANT_CACHE_DIR"] = _CACHE

# PoCL compiles without its optimizer, in a third to a tenth of the time; the soak has it.
if "SOAK_MINUTES" not in os.environ:
    os.environ["POCL_EXTRA_BUILD_FLAGS"] = "-cl-opt-disable"

# Hypothesis draws the same examples in every run but a soak, and how long that takes on a busy machine is no error.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests", deadline=None, derandomize="SOAK_MINUTES" not in os.environ, database=None,
        suppress_health_check=[HealthCheck.too_slow], print_blob=True,
    )  # fmt: skip
    settings.load_profile("tests")

# Of Ray's, a node that has not started in 30 s is given up, and workers have a thirtieth of a busy machine's time.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
os.environ.setdefault("RAY_worker_niceness", "0")

# JAX would take three quarters of a GPU, which other tests and workers use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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


LEFT_OUT = {"not slow": {"slow", "soak"}, "not soak": {"soak"}}
"""Marks of a whole test that is in none of the tier's runs, by the tier's expression."""

NO_GPU = "tests marked gpu are left out: torch.cuda.is_available() is False here"


def pytest_report_header():
    return None if HAS_GPU else NO_GPU


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Leave out tests that need a GPU where there is none, or are of another tier, before their cases are made."""
    if name.startswith("test") and inspect.isfunction(obj):
        marks = {mark.name for mark in (*collector.iter_markers(), *getattr(obj, "pytestmark", ()))}
        left_out = LEFT_OUT.get(collector.config.option.markexpr, set()) | (set() if HAS_GPU else {"gpu"})
        return [] if marks & left_out else None
    return None


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config, items):
    """Move what `sample(n)` leaves out to the tier below, and deselect cases that need a GPU where there is none.

    What `sample(n, 1)` leaves out repeats its neighbours here, and still runs with other versions of dependencies.
    """
    seen = Counter()
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker("slow")
        if mark := item.get_closest_marker("sample"):
            every, left_out = mark.args[0], mark.args[1] if len(mark.args) > 1 else 3
            tier = "soak" if item.get_closest_marker("slow") else "slow"
            if (tier, left_out) == ("soak", 1):
                continue
            case = seen[item.function, tier]
            seen[item.function, tier] += 1
            if case % every:
                item.add_marker(tier)
                if left_out == 1:
                    item.add_marker("versions")
                if (case - case // every - 1) % left_out:
                    item.add_marker("slow")
                    item.add_marker("soak")
    if HAS_GPU:
        return
    config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
    items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_collection_finish():
    # Thousands of collected tests are millions of objects that live to the end: without this each full garbage
    # collection, of which tests ask for many, walks them for a second.
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or C extensions report what is frozen as leaks; pytest collects before that


@pytest.fixture(autouse=HAS_GPU)
def _memory_for_other_processes(request):
    """Give unused memory back to the GPU, which the workers of xdist share."""
    yield
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()


@pytest.fixture
def one_thread():
    """Small tensors: threads that wait for one another cost more than they give where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def own_registries():
    """Fields, curves and families that a module's tests register are gone after it."""
    from accelerant.algebra.curve.parameters import CURVES, FAMILIES
    from accelerant.algebra.field.parameters import FIELDS

    with mock.patch.dict(CURVES), mock.patch.dict(FIELDS), mock.patch.dict(FAMILIES):
        yield


@pytest.fixture
def command_line(capsys):
    """Runs a command line in this process; returns status, output and errors."""
    import commands

    return functools.partial(commands.run, "", capsys)


def pytest_unconfigure():
    if _CACHE:
        shutil.rmtree(_CACHE, ignore_errors=True)
