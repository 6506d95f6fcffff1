"""The pages that show Python sessions are true, line by line."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```pycon" in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_the_page_is_true(page):
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name
