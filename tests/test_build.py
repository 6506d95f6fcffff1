"""Licenses of the dependencies, lock files, and the check of the wheel's contents."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def script(name, folder="scripts"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


licenses, lock, check_wheel = script("licenses"), script("lock"), script("check_wheel")
hatch_build = script("hatch_build", ".")


def test_every_dependency_has_an_allowed_license(capsys):
    assert licenses.main() == 0
    listed = capsys.readouterr().out
    for name in ("torch", "numpy", "llvmlite", "typer", "click"):  # click is typer's
        assert f"{name} " in listed


@pytest.mark.parametrize(("package", "license", "allowed"), [
    ("a", "MIT", True),
    ("a", "BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", True),
    ("a", "Apache-2.0 OR LGPL-2.1-or-later", True),
    ("a", "Apache-2.0 AND (LGPL-2.1-or-later OR GPL-3.0-only)", False),
    ("a", "GPL-3.0-or-later", False),
    ("a", "unknown", False),
    ("nvidia-cuda-nvrtc", "LicenseRef-NVIDIA-Proprietary", True),
    ("cuda-bindings", "LicenseRef-NVIDIA-SOFTWARE-LICENSE", True),
    ("a", "LicenseRef-NVIDIA-Proprietary", False),
])  # fmt: skip
def test_only_the_allow_list_passes(package, license, allowed):
    assert licenses.is_allowed(package, license) is allowed


def test_older_metadata_is_read():
    metadata = Message()
    metadata["Classifier"] = "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"
    assert not licenses.is_allowed("a", licenses.license_of(metadata))
    metadata["License"] = "BSD"
    assert licenses.license_of(metadata) == "BSD-3-Clause"
    assert licenses.license_of(Message()) == licenses.license_of(Message(), "Some terms\n") == "unknown"
    assert licenses.license_of(Message(), "BSD 2-Clause License\n\nCopyright") == "BSD-2-Clause"


def test_requirements_are_ranges_and_the_pins_are_in_them():
    """An upper bound is a conflict with somebody's other packages: only cuda12 has one, which chooses between two."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = whole["project"]
    groups = {name: needed for name, needed in project["optional-dependencies"].items() if name != "cuda12"}
    lines = [line for group in groups.values() for line in group if not line.startswith("accelerant[")]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    for requirement in map(Requirement, [*whole["build-system"]["requires"], *project["dependencies"], *lines]):
        assert [one.operator for one in requirement.specifier] == [">="], requirement
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, (requirement, version)


@pytest.mark.parametrize(("programs", "why"), [
    ({}, "ci-setup: this system has no apt-get"),
    ({"dpkg-query": "exit 1", "apt-get": "exit 1", "id": "echo 1000"}, "must be installed, which needs root"),
])  # fmt: skip
def test_ci_says_first_that_it_cannot_install(programs, why, tmp_path):
    for name in ("env", "dirname", "bash"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    command = [shutil.which("bash"), str(ROOT / ".ci" / "run")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert why in line


def test_a_lock_has_a_hash_for_every_wheel():
    def entry(name, **info):
        return {"metadata": {"name": name, "version": "1.0"}, "download_info": info}

    sound = entry("b", archive_info={"hashes": {"sha256": "ab"}}), entry("A", archive_info={"hashes": {"sha256": "cd"}})
    report = {"install": [*sound, entry("accelerant", dir_info={})]}
    assert lock.lines_of(report) == ["A==1.0 --hash=sha256:cd", "b==1.0 --hash=sha256:ab"]
    with pytest.raises(SystemExit, match=r"c 1\.0: the index gives no SHA-256"):
        lock.lines_of({"install": [entry("c", archive_info={"hashes": {}})]})


def test_a_wheel_that_lacks_a_file_or_has_another_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(check_wheel, "run", lambda *command: "src/accelerant/a.py\nsrc/accelerant/ops/k.cu\n")
    wheel = tmp_path / "a.whl"

    def written(*names):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in (*names, "accelerant-0.dist-info/METADATA"):
                archive.writestr(name, "")
        return wheel

    monkeypatch.setattr(check_wheel, "ROOT", tmp_path)
    (tmp_path / ".git").touch()
    check_wheel.check_contents(written("accelerant/a.py", "accelerant/ops/k.cu"))
    with pytest.raises(SystemExit, match=r"lacks \['accelerant/ops/k\.cu'\], and should not have \['tests/b\.py'\]"):
        check_wheel.check_contents(written("accelerant/a.py", "tests/b.py"))


@pytest.mark.parametrize("url", [None, "https://example.org/a/b"])
def test_an_index_shows_no_link_between_files(url):
    """It has none of the repository's files, and shows README.md at another address."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = hatch_build.description(text, url, "0123abc")
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(shown)
    targets = re.findall(r'(?:href|src|srcset)="([^"]*)"', html)
    assert all(target.startswith("https://") for target in targets), targets
    if url:
        assert {f"{url}/blob/0123abc/{path}" for path in ("docs/ops.md", "README.md#install")} <= set(targets)
        assert f"{url}/raw/0123abc/docs/pictures/chart-wide-light.svg" in targets
    blocks = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert blocks.findall(shown) == blocks.findall(text)
    assert "docs/ops.md" in shown


def test_the_urls_are_those_of_the_repository_that_is_built(monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert hatch_build.repository() is None
    monkeypatch.setenv("GITHUB_REPOSITORY", "a/b")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example.org")
    assert (
        hatch_build.urls(hatch_build.repository())["Changelog"] == "https://git.example.org/a/b/blob/HEAD/CHANGELOG.md"
    )


def test_every_place_names_the_version():
    """The release workflow compares the tag with the first two."""
    version = re.search(r'"(.*)"', (ROOT / "src/accelerant/_version.py").read_text().partition("__version__")[2])[1]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    chart = (ROOT / "deploy/helm/accelerant/Chart.yaml").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\nversion: {version}\nappVersion: {version}\n" in chart
