"""docs/architecture.md names files, folders and classes that exist, and files that its three calls run through."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import accelerant
from accelerant.config import override
from accelerant.privacy import dp
from requirements import require_module

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "accelerant"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE))
FILES = sorted({name for name in CODE if re.fullmatch(r"[\w./-]+\.(py|c|h|cu|toml|md)", name)})
FOLDERS = sorted(
    {name.rstrip("/") for name in CODE if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", name) and "/" in name} - set(FILES)
)
CLASSES = sorted({name for name in CODE if re.fullmatch(r"[A-Z][a-z0-9]+([A-Z]\w*)?", name)})
SOURCES = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]


@pytest.mark.parametrize("name", FILES)
def test_file_exists(name):
    if "/" in name:
        # Call 3 names its files relative to privacy/dp.
        assert any((base / name).is_file() for base in (PACKAGE, ROOT, PACKAGE / "privacy" / "dp"))
    else:
        assert (ROOT / name).is_file() or any(PACKAGE.rglob(name))


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_exists(name):
    assert (PACKAGE / name).is_dir() or (ROOT / name).is_dir()


@pytest.mark.parametrize("name", CLASSES)
def test_class_exists(name):
    assert any(re.search(rf"^(class {name}\b|{name}\b.*=)", source, re.MULTILINE) for source in SOURCES)


def test_the_page_is_read():
    assert len(FILES) > 60
    assert len(FOLDERS) > 20
    assert len(CLASSES) > 25


def test_the_drawing_is_that_of_the_declared_layers():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert drawn == pictures.architecture(), "run scripts/pictures.py architecture"


# --- the three calls, traced on the CPU ------------------------------------------------------------------------------
def section(title):
    """Return the files of the package that a section names, relative to the package."""
    text = TEXT.partition(f"{title}\n")[2]
    text = re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    names = re.findall(r"`([\w/.]+\.py)`", text)
    return {name if (PACKAGE / name).exists() else f"privacy/dp/{name}" for name in names}


def visited(call):
    """Return the package's files whose functions a call runs."""
    files = set()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            files.add(frame.f_code.co_filename[len(f"{PACKAGE}/") :])

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def test_layer_norm_on_the_fast_path():
    x, weight, bias = torch.randn(2, 24), torch.ones(24), torch.zeros(24)
    for _ in range(5):
        accelerant.ops.layer_norm(x, weight, bias)
    assert visited(lambda: accelerant.ops.layer_norm(x, weight, bias)) == section("### The CPU fast path")


def test_layer_norm_on_the_general_path():
    x, weight, bias = torch.randn(2, 40, requires_grad=True), torch.ones(40), torch.zeros(40)
    with override(implementation={"layer_norm_bwd": "torch"}):  # also keeps the call from torch's autograd
        files = visited(lambda: accelerant.ops.layer_norm(x, weight, bias).sum().backward())
    gpu = {f"runtime/{name}.py" for name in ("compilation/cache", "providers/cuda_launch")}
    gpu |= {"ops/norm/triton_kernels.py"}
    unused = {f"runtime/dispatch/{name}.py" for name in ("race", "plan")} | {"ops/_library.py"}
    assert section("### The general path") - gpu - unused <= files


@pytest.mark.slow
def test_msm():
    group = accelerant.zk.curve("bn254_g1")
    points = group.mul(group.generator, [1, 2, 3])
    accelerant.zk.msm([5, 7, 11], points)  # compiles outside the trace
    files = visited(lambda: accelerant.zk.msm([5, 7, 11], points))
    device = {f"algebra/msm/{name}.py" for name in ("device", "device_plan")}
    assert section("## Call 2: `zk.msm`") - device - {"algebra/msm/cpu.py"} <= files


@pytest.mark.slow
def test_private_step():
    require_module("dp_accounting")
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dp.make_private(model, optimizer, noise_multiplier=1.0, delta=1e-3, max_grad_norm=1.0, sample_rate=0.5)

    def step():
        for batch in private.batches((torch.randn(40, 6),), steps=1):
            private.model(batch.tensors[0]).square().mean().backward()
            private.optimizer.step()

    step()  # compiles outside the trace
    files = visited(step)
    private.close()
    absent = {f"clipping/{name}.py" for name in ("convolution", "sequences")} | {"training/step.py"}
    assert section("## Call 3: a private training step") - {f"privacy/dp/{name}" for name in absent} <= files
