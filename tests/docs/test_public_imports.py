"""What pages and examples import, and the paths that they name, are public: found in `__all__` of public modules."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import accelerant

ROOT = Path(__file__).parents[2]
REFERENCE = {*re.findall(r"api/([\w.]+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))}
EXEMPT = {"accelerant.nn.layers.FUSED", "accelerant.operations", "accelerant.providers"}
"""Named in an error message and its explanation, and nowhere else; groups of entry points."""

PAGES = sorted([
    *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.*"), ROOT / "README.md", ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
])  # fmt: skip


def is_public(module: ModuleType) -> bool:
    """Return whether a module's names are for users: a package's with `__all__`, or those of the API reference."""
    return hasattr(module, "__all__") and (hasattr(module, "__path__") or module.__name__ in REFERENCE)


def problem(path: str) -> str:
    """Return why users cannot, or should not, use a path like "accelerant.ops.gelu"; empty if they can."""
    found, at = accelerant, "accelerant"
    for name in path.split(".")[1:]:
        if isinstance(found, ModuleType):
            listed = name in getattr(found, "__all__", ())
            parent, found = found, getattr(found, name, None)
            if found is None:
                return f"{at} has no {name}"
            if isinstance(found, ModuleType):  # nn.functional is torch's
                usable = is_public(found) or hasattr(found, "__path__") or not found.__name__.startswith("accelerant")
            else:
                usable = hasattr(parent, "__path__")
            if not (listed or usable):
                return f"{at}.{name} is private: {at} exports what it has for users"
        elif not inspect.isclass(found):
            return ""  # an attribute of a value, which only a run knows
        elif not hasattr(found, name) and name not in inspect.get_annotations(found):
            return f"{at} has no {name}"
        else:
            found = getattr(found, name, None)
        at += f".{name}"
    return ""


def blocks(page: Path) -> list[str]:
    """Return the Python programs of a page, without prompts and output."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        return [text]
    if page.suffix == ".ipynb":
        return ["\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code")]
    sessions = re.findall(r"^```pycon\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    typed = ["\n".join(line[4:] for line in code.splitlines() if line[:3] in (">>>", "...")) for code in sessions]
    return ["\n".join(typed), *re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)]


def paths_of(program: str) -> set[str]:
    """Return the paths of the package that a program imports, and those that begin with an imported name."""
    names, paths = {"acl": "accelerant", "accelerant": "accelerant"}, set()
    tree = ast.parse(inspect.cleandoc(program))
    for part in ast.walk(tree):
        if isinstance(part, ast.ImportFrom) and (part.module or "").partition(".")[0] == "accelerant":
            names |= {each.asname or each.name: f"{part.module}.{each.name}" for each in part.names}
        elif isinstance(part, ast.Import):
            names |= {each.asname: each.name for each in part.names if each.asname and "accelerant" in each.name}
            paths |= {each.name for each in part.names if each.name.startswith("accelerant.")}
    for part in ast.walk(tree):
        if isinstance(part, ast.Attribute):
            whole = ast.unparse(part)
            first, _, rest = whole.partition(".")
            if first in names and re.fullmatch(r"[\w.]+", whole):
                paths.add(f"{names[first]}.{rest}")
    return paths | {path for path in names.values() if path != "accelerant"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_public(page):
    if page.suffix not in (".md", ".py", ".ipynb") or page.name == "migration.md":
        pytest.skip("no program, or names of before")
    named = set()
    for program in blocks(page):
        named |= paths_of(program)
    text = page.read_text(encoding="utf-8")
    if page.name == "migration.md":  # whose left column has the names that are gone
        text = "\n".join(line.rpartition(" | ")[2] for line in text.splitlines())
    inline = re.findall(r"`(?:acl|accelerant)((?:\.[A-Za-z_]\w*)+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    named |= {f"accelerant{path}" for path in inline if page.suffix == ".md"}
    problems = {path: found for path in sorted(named - EXEMPT) if (found := problem(path))}
    assert not problems


@pytest.mark.parametrize(("path", "found"), [
    ("accelerant.ops.gelu", ""),
    ("accelerant.runtime.memory.statistics", ""),
    ("accelerant.nonsense", "accelerant has no nonsense"),
    ("accelerant.ops.nonsense", "accelerant.ops has no nonsense"),
    ("accelerant.Accelerator.nonsense", "accelerant.Accelerator has no nonsense"),
    ("accelerant.runtime.memory.limits.limit", "accelerant.runtime.memory.limits is private"),
])  # fmt: skip
def test_a_path_that_users_lack_is_found(path, found):
    assert (problem(path).startswith(found), bool(problem(path))) == (True, bool(found))


def test_modules_are_attributes_without_an_import():
    for name in (
        "runtime",
        "algebra",
        "ops",
        "nn",
        "zk",
        "privacy",
        "distributed",
        "search",
        "config",
        "testing",
        "bench",
    ):
        assert getattr(accelerant, name).__name__ == f"accelerant.{name}"
    assert accelerant.runtime.streams.Stream
    with pytest.raises(AttributeError, match=r"module 'accelerant\.runtime' has no attribute 'nonsense'"):
        _ = accelerant.runtime.nonsense
