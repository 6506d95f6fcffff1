"""The pages that show Python sessions are true, line by line, and the README's programs run."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

from accelerant import errors

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```pycon" in page.read_text(encoding="utf-8"))


PUBLIC = (
    "", "accelerator", "runtime", "runtime.compilation", "runtime.memory", "runtime.monitoring", "runtime.registry",
    "runtime.streams", "runtime.time_limit",
)  # fmt: skip
"""Modules whose every name is for users."""


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_stands_in_a_page(module):
    words = set(re.findall(r"\w+", "".join(page.read_text(encoding="utf-8") for page in (README, *DOCS.glob("*.md")))))
    names = importlib.import_module(f"accelerant.{module}".rstrip(".")).__all__
    assert not [name for name in names if name not in words]


LONG_PAGES = (
    "differential-privacy.md", "privacy-accuracy.md", "privacy-ledger.md", "private-queries.md", "fit.md", "ntt.md",
    "zk.md", "manager.md", "models.md", "groth16.md", "homomorphic.md", "proof-of-inference.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG_PAGES else []) for page in PAGES]
)
@pytest.mark.usefixtures("own_registries")
def test_every_line_of_the_page_is_true(page):
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted == len(re.findall(r"^>>> ", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)) > 2
    assert result.failed == 0


def test_the_readme_has_programs():
    assert len(PROGRAMS) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_readme_runs(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


BASH = re.compile(r"\{[^}\s]*,[^}\s]*\}|<\(|\[\[|&>|<<<|\bsource |\$'|\S\[[a-z,]+\](?!')")
"""Braces, arrays and redirections that `sh` does not have, and extras without quotation marks, which zsh expands."""


def test_code_fits_the_page_and_the_commands_run_in_sh():
    """98 characters fit beside GitHub's column of a repository, 112 of a page of 1,012 pixels."""
    for page in (README, *DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for kind, code in re.findall(r"^```(sh|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            longest = max(code.splitlines(), key=len)
            assert len(longest) <= (98 if page == README else 112), f"{page.name}: {longest}"
            if kind == "sh":
                assert not (found := BASH.search(code)), f"{page.name}: {found}"


def test_every_link_of_a_page_leads_somewhere():
    for page in (README, *DOCS.glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


BRITISH = re.compile(
    r"\b(?!utilisation_)(?:re|un|de)?(?:initial|material|maxim|minim|normal|optim|organ|parametr|quant|random|recogn|serial|special|"
    r"summar|synchron|token|util|vector)is(?:e[drs]?|ers|ing|ations?)\b|\b(?:behaviou|colou|favou)rs?\b", re.IGNORECASE,
)  # fmt: skip
"""Spellings that torch does not have: optimizer, tokenizer. The metric `utilisation_percent` is an older name."""


def test_names_and_text_have_one_spelling():
    repository = DOCS.parent
    pages = (README, *DOCS.glob("*.md"), *(repository / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG")))
    for path in (*pages, *repository.glob("src/**/*.py"), *repository.glob("examples/*.py")):
        found = BRITISH.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(repository)}: {found[0]}"


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def public(module):
    """Return the names of a module's `__all__`, and the modules among them, without importing it."""
    path = DOCS.parent.joinpath("src", *module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    names, modules = [], set()
    for part in ast.walk(tree):
        if isinstance(part, ast.Assign) and getattr(part.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(part.value)
        elif isinstance(part, ast.ImportFrom) and part.module == module:
            modules |= {alias.name for alias in part.names}
    return {*names}, modules & {*names}


def test_the_api_reference_has_every_public_name():
    """Its page of a module has the names of `__all__` that are no modules; mkdocs fails for a name without an entry."""
    pages = re.findall(r"api/([\w.]+)\.md", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    assert len(set(pages)) == len(pages)
    others = ("config", "testing", "service", "bench", "privacy.dp.clipping", *PUBLIC[1:])
    found, left = {}, ["accelerant", *(f"accelerant.{name}" for name in others)]
    while left:
        names, modules = public(module := left.pop())
        left += [f"{module}.{name}" for name in modules]
        found[module] = names - modules
    assert len(found) > 30
    assert "keygen" in found["accelerant.privacy.he.bfv"]
    assert not {module for module, names in found.items() if names} - {*pages}


def test_every_page_is_on_the_site():
    site = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in site, f"mkdocs.yml has no {page.name} in its nav"


def test_the_gpus_that_ran_are_those_of_the_records():
    records = (DOCS.parent / "benchmarks/results").glob("*.*")
    texts = (path.read_text(encoding="utf-8") for path in records if path.suffix in (".json", ".txt"))
    ran = {name for text in texts for name in re.findall(r"NVIDIA (?:GeForce )?([A-Z]+ ?\d+)", text)}
    table = (DOCS / "gpu.md").read_text(encoding="utf-8").partition("## GPU generations")[2]
    said = {
        row[1]: row[2] for row in re.findall(r"^\| (\w+) \| sm_.*? \| (.*?) \| .*? \| (.*) \|$", table, re.MULTILINE)
    }
    assert ran >= {"H100", "H200"}
    for examples, runs in said.items():
        for name in ran:
            assert (name in examples) == (f"{name}: " in runs), f"{name}: {runs}"
    assert sum(runs == "no" for runs in said.values()) == len(said) - 1


def test_every_test_of_the_features_page_exists():
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", (DOCS / "features.md").read_text(encoding="utf-8"))
    assert len(named) >= 40
    for path, name in named:
        assert f"def {name}(" in (DOCS.parent / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_every_error_of_the_troubleshooting_page_exists():
    table = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Errors")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    assert len(named) >= 8
    assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} <= set(errors.__all__)
