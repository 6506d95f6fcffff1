"""Hook of hatchling: the project's URLs, and README.md as an index shows it, where links between files lead nowhere.

In GitHub Actions the repository is known, by GITHUB_REPOSITORY, and links lead to the commit that is built. Elsewhere
they become plain text, and there are no URLs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_TARGET = r"(?!https?:|mailto:)([^)\s]+)"
_BADGE = re.compile(r"^\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)\n", re.MULTILINE)
_PICTURE = re.compile(r"<picture>.*?</picture>\n", re.DOTALL)
_LINK = re.compile(rf"(!?)\[([^\]]+)\]\({_TARGET}\)")
_END = re.compile(rf"(?<=\]\(){_TARGET}(?=\))")
_ATTRIBUTE = re.compile(r'(?<=src=")(?!https?:)([^"]+)(?=")|(?<=srcset=")(?!https?:)([^"]+)(?=")')


def repository() -> str | None:
    """Return the URL of the repository that GitHub Actions builds; None elsewhere."""
    name = os.environ.get("GITHUB_REPOSITORY")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else None


def urls(url: str) -> dict[str, str]:
    """Return the URLs that an index shows."""
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    return {"Source": url, "Issues": f"{url}/issues"} | {
        name: f"{url}/blob/HEAD/{page}" for name, page in pages.items()
    }


def description(text: str, url: str | None, commit: str = "HEAD") -> str:
    """Return README.md with links to the files of a repository at a commit; for url None, without links to files."""

    def linked(match: re.Match[str]) -> str:
        target = next(group for group in match.groups() if group)
        if target.startswith("#"):
            return f"{url}/blob/{commit}/README.md{target}"
        kind = "raw" if target.endswith((".svg", ".png")) else "blob"
        return f"{url}/{kind}/{commit}/{target}"

    def converted(part: str) -> str:
        if url is None:
            return _LINK.sub(lambda match: match[2], _PICTURE.sub("", _BADGE.sub("", part)))
        return _ATTRIBUTE.sub(linked, _END.sub(linked, part))

    return "".join(part if part.startswith("```") else converted(part) for part in _CODE.split(text))


def get_metadata_hook() -> type:
    """Return the hook that fills in readme and urls."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface  # the tests have no hatchling

    class Hook(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            url, commit = repository(), os.environ.get("GITHUB_SHA", "HEAD")
            text = Path(self.root, "README.md").read_text(encoding="utf-8")
            metadata["readme"] = {"content-type": "text/markdown", "text": description(text, url, commit)}
            metadata["urls"] = {} if url is None else urls(url)

    return Hook
