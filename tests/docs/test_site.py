"""The checks of the documentation's site; `make docs` builds the site itself."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

import accelerant
from requirements import require_module

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site():
    for name in ("mkdocs", "griffe"):
        require_module(name, extra="docs")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("html", "reason"), [
    ('<a href="absent.html">', "absent.html, which does not exist"),
    ('<a href="b.html#absent">', "b.html#absent, which has no such anchor"),
    ('<img srcset="https://example.org/a.svg 2x">', "loads https://example.org/a.svg from another host"),
    ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css from another host"),
    ("<style>@import 'https://example.org/a.css'</style>", "loads https://example.org/a.css from another host"),
    ('<script src="absent.js"></script>', "absent.js, which does not exist"),
])  # fmt: skip
def test_a_wrong_link_of_the_site_is_found(site, monkeypatch, tmp_path, html, reason):
    monkeypatch.setattr(site, "api_modules", list)
    (tmp_path / "a.html").write_text('<a href="b.html#here">to b</a><a href="https://example.org">elsewhere</a>')
    (tmp_path / "b.html").write_text('<p id="here">')
    site.on_post_build(SimpleNamespace(site_dir=tmp_path))
    (tmp_path / "a.html").write_text(html)
    with pytest.raises(site.PluginError) as error:
        site.on_post_build(SimpleNamespace(site_dir=tmp_path))
    assert reason in str(error.value)


def test_a_public_name_without_an_entry_is_found(site, monkeypatch, tmp_path):
    monkeypatch.setattr(site, "api_modules", lambda: ["accelerant.zk.groth16"])
    (tmp_path / "api").mkdir()
    page = tmp_path / "api" / "accelerant.zk.groth16.html"
    names = site.public_names("accelerant.zk.groth16")
    page.write_text("".join(f'<h2 id="accelerant.zk.groth16.{name}">' for name in names if name != "prove"))
    with pytest.raises(site.PluginError, match=r"accelerant\.zk\.groth16\.prove has no entry$"):
        site.on_post_build(SimpleNamespace(site_dir=tmp_path))


def test_public_names_are_those_of_all_but_for_modules(site):
    assert set(site.public_names("accelerant")) == {
        name
        for name in accelerant.__all__
        if name not in ("__version__", "distributed", "errors", "nn", "ops", "privacy", "runtime", "search", "zk")
    }
    assert set(site.public_names("accelerant.ops")) == set(accelerant.ops.__all__)  # gelu is a folder and a function


def test_sessions_of_docstrings_are_code(site):
    assert site._fenced("Add.\n\n>>> add(1, 2)\n3\n\nMore.") == "Add.\n\n\n```pycon\n>>> add(1, 2)\n3\n```\n\nMore."


def test_equations_of_docstrings_are_code(site):
    text = "Scale.\n\ny = x * w\nz = y * y\n\nIt is y = x here.\n\nArgs:\n    x: with w = 1"
    assert site._formulas_fenced(text) == text.replace("y = x * w\nz = y * y", "```text\ny = x * w\nz = y * y\n```")
