"""Build the sdist, from it the wheel, install that into a fresh environment, and train from there.

usage: scripts/check_wheel.py [FOLDER]            FOLDER gets both files; by default they are deleted

The dependencies are those of the environment that runs this. The package itself comes from the wheel alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
STEPS = 20

KERNELS = {".c", ".h", ".cl", ".cu", ".cuh", ".wgsl"}
SUFFIXES = KERNELS | {".py", ".sol", ".typed", ".json", ".txt", ".js", ".html", ".svg", ".css"}
"""Kinds of files that the wheel may have besides its metadata."""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command without this process's PYTHON* variables; return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def pip(*arguments: str | Path, python: Path | None = None) -> None:
    """Run pip for an environment, by default this one."""
    chosen = ("--python", python) if python else ()
    run(PYTHON, "-m", "pip", *chosen, "--quiet", "--disable-pip-version-check", *arguments)


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """Return the sdist, and the wheel that is built from what the sdist contains."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    backend = folder / "backend"
    pip("install", "--target", backend, "--constraint", ROOT / "constraints.txt", *requires)

    def call(function: str, cwd: Path) -> Path:
        code = f"from hatchling.build import {function}; print({function}({str(out)!r}))"
        return out / run(PYTHON, "-c", code, cwd=cwd, PYTHONPATH=str(backend)).splitlines()[-1]

    sdist = call("build_sdist", ROOT)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return sdist, call("build_wheel", source)


def check_contents(wheel: Path) -> None:
    """Compare the wheel's files with those of the source tree."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "src").splitlines() if (ROOT / ".git").exists() else []
    absent = {name.removeprefix("src/") for name in tracked} - names
    strange = {name for name in names if not name.startswith("accelerant/") or Path(name).suffix not in SUFFIXES}
    if absent or strange:
        raise SystemExit(f"{wheel.name} lacks {sorted(absent)}, and should not have {sorted(strange)}")


def check_install(wheel: Path, folder: Path) -> str:
    """Install the wheel into a fresh environment and train there; return the summary's first figures."""
    fresh = folder / "fresh"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    (site,) = fresh.glob("lib/python*/site-packages")
    # A folder named in a .pth file serves its packages, but not its own .pth files: an editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip("install", "--no-deps", "--ignore-installed", wheel, python=python)
    where = run(python, "-c", "import accelerant; print(accelerant.__file__)", cwd=folder).strip()
    if not Path(where).is_relative_to(fresh):
        raise SystemExit(f"accelerant was imported from {where}, not from the wheel")
    environment = {"ACCELERANT_CACHE_DIR": str(folder / "cache"), "ACCELERANT_BACKEND": "cpu"}
    command = fresh / "bin" / "accelerant"
    run(command, "train", "--preset", "tiny", "--steps", str(STEPS), "--out", "run", cwd=folder, **environment)
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    if summary["steps"] != STEPS:
        raise SystemExit(f"{summary['steps']} steps were made instead of {STEPS}")
    return f"{STEPS} steps, held-out loss {summary['validation_nats_per_byte']:.3f} nats a byte"


def main() -> None:
    """Build, check and train; print one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = Path(sys.argv[1]).resolve() if sys.argv[1:] else folder / "dist"
        out.mkdir(parents=True, exist_ok=True)
        sdist, wheel = build(folder, out)
        check_contents(wheel)
        for file in (sdist, wheel):
            print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
        print(f"trained from the wheel: {check_install(wheel, folder)}")


if __name__ == "__main__":
    main()
