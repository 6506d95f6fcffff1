"""Write a lock file: the version and the SHA-256 of every wheel that pip would install on this machine now.

usage: scripts/lock.py FILE

The hashes are those of the wheels of this machine's index, system and Python. In a new environment `make run LOCK=FILE`
installs these wheels and no others. The default is constraints.txt, which pins versions alone: a version of PyTorch is
another wheel on another index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Return requirements with hashes from pip's installation report, by name; the project itself is left out."""
    lines = []
    for entry in report["install"]:
        archive = entry["download_info"].get("archive_info")
        if archive is None:  # the project's folder
            continue
        name, version = entry["metadata"]["name"], entry["metadata"]["version"]
        if "sha256" not in archive.get("hashes", {}):
            raise SystemExit(f"{name} {version}: the index gives no SHA-256")
        lines.append(f"{name}=={version} --hash=sha256:{archive['hashes']['sha256']}")
    return sorted(lines, key=str.lower)


def main() -> None:
    """Ask pip what it would install for the project with its development tools, and write that."""
    (target,) = sys.argv[1:]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[dev]", "editables", *build]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    Path(target).write_text("\n".join(lines_of(json.loads(report))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
