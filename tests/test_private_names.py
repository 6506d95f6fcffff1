"""The private names of torch and transformers that src uses are those of private_names.txt, and all exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

SRC = Path(__file__).parents[1] / "src"
LIST = Path(__file__).with_name("private_names.txt")
LIBRARIES = ("torch", "transformers")
OF_CUDA = "builds for CUDA"
PRIVATE = re.compile(r"\._(?!_)")


def names_of(tree):
    """All private dotted names of the libraries in a module: imports, attributes of what is imported, strings."""
    known, found = {}, set()

    def dotted(node):
        if isinstance(node, ast.Name):
            return known.get(node.id)
        base = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return base and f"{base}.{node.attr}"

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                known[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.split(".")[0]
                )
                found.add(each.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"
                found.add(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (name := dotted(node.value)):
            known.setdefault(node.targets[0].id, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            found.add(name)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+(\.\w+)+", node.value)
        ):
            found.add(node.value)
    return {name for name in found if name.split(".")[0] in LIBRARIES and PRIVATE.search(name)}


def used():
    """Private name -> the modules of src that use it; without the beginnings of longer names."""
    places = {}
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(library in text for library in LIBRARIES):
            continue
        for name in names_of(ast.parse(text)):
            places.setdefault(name, []).append(str(path.relative_to(SRC)))
    return {name: where for name, where in places.items() if not any(other.startswith(f"{name}.") for other in places)}


def listed():
    """Private name -> the reason in the list, or ''."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.partition("#") for line in lines)}


def resolve(name):
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:at]))


@pytest.mark.slow  # reads all of src
def test_the_list_is_that_of_src():
    found, wanted = used(), listed()
    assert sorted(found) == list(wanted), {name: found.get(name, "nowhere") for name in found.keys() ^ wanted.keys()}


@pytest.mark.slow  # imports torch's compiler
@pytest.mark.versions
def test_each_name_exists_in_the_installed_version():
    absent = {}
    for name, reason in listed().items():
        if reason.startswith(OF_CUDA) and torch.version.cuda is None:
            continue
        try:
            resolve(name)
        except (AttributeError, ModuleNotFoundError) as error:
            absent[name] = str(error)
    assert not absent


def test_names_are_found_however_they_are_written():
    code = """
import torch, torch.nn.functional as F
from torch import _C as c
from torch.utils import _pytree as pytree, data
from .torch import _mine
hooks = torch._C._autograd
hooks._profiler_enabled(); c._cuda_init(); pytree.tree_map; "torch._dynamo"; torch.Tensor.__add__; F.gelu; x._version
"""
    assert names_of(ast.parse(code)) == {
        "torch._C", "torch._C._autograd", "torch._C._autograd._profiler_enabled", "torch._C._cuda_init",
        "torch._dynamo", "torch.utils._pytree", "torch.utils._pytree.tree_map",
    }  # fmt: skip
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("torch._C._of_an_older_version")
