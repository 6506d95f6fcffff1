"""docs/architecture.md names only files, folders and classes that exist."""

import re
from pathlib import Path

import pytest

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
