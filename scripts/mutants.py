"""Change a module in a sample of its places, one at a time, and run its tests, which should fail: mutation testing.

usage: scripts/mutants.py MODULE [--sample N] [--seed S] [--minutes M] [--tests "PATHS"] [--record FILE]
    [--jobs N] [--python PYTHON] [--gpu]

The mutants are those of Cosmic Ray, in whose environment this runs (`make mutants`). They are made in a copy of the
tracked files in a temporary folder, so that the working tree stays as it is, however this ends. Of the places in the
module that can be mutated N are drawn, and of each place one mutant. Annotations are not mutated, since nothing
evaluates them. A mutant is killed if the tests of its module fail or take too long; those that no test can kill are
listed in benchmarks/results/mutants/equivalent.toml, by their lines. So are the functions that only a GPU runs, of
which no place is drawn unless --gpu runs the tests that need one; the record has how many places those are, and why.

Tests named as the mutated file run first, then those that import it, then the others, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkItem

ROOT = Path(__file__).parents[1]
SOURCES = Path("src/accelerant")
RESULTS = Path("benchmarks/results/mutants")
TESTS = {
    "service/jobs": "tests/service/test_job_store.py tests/service/test_job_queue.py tests/service/test_job_service.py",
    "service/guard": "tests/service/test_guard.py tests/service/test_api_keys.py",
    "nn/train/checkpoint": "tests/nn/train/test_checkpoint.py tests/nn/train/test_resume.py",
    "privacy/dp/clipping": "tests/privacy/dp/clipping tests/privacy/dp/training/test_optimizer.py",
    "privacy/dp/ledger": "tests/privacy/dp/ledger",
    "privacy/mpc/secagg": "tests/privacy/mpc/test_secagg.py tests/privacy/mpc/test_beaver.py "
    "tests/privacy/mpc/test_secagg_search.py",
    "algebra": "tests/algebra tests/zk/test_field_api.py tests/zk/test_curve_api.py tests/zk/test_ntt.py "
    "tests/zk/test_msm.py tests/zk/test_registration.py tests/privacy/he",
    "algebra/field": "tests/algebra/field tests/zk/test_field_api.py tests/zk/test_registration.py",
    "algebra/curve": "tests/algebra/curve tests/zk/test_curve_api.py tests/zk/test_msm.py "
    "tests/zk/test_registration.py",
    "algebra/ntt": "tests/algebra/ntt tests/zk/test_ntt.py tests/privacy/he/test_bfv.py",
    "zk/groth16/verifier": "tests/zk/groth16/test_verifier.py tests/zk/groth16/test_untrusted.py",
    "zk/groth16/keys": "tests/zk/groth16/test_prover.py tests/zk/groth16/test_untrusted.py",
}
"""Tests of modules, the most likely to fail first. Of others it is the folder of the same path in tests/."""


def tests_of(module: str) -> list[str]:
    """Return the tests of a module: its own entry of TESTS, or the folder in tests/ of it or of the nearest parent."""
    for part in (module, *map(str, Path(module).parents)):
        if found := TESTS.get(part.removesuffix(".py")):
            return found.split()
        if part != "." and (ROOT / "tests" / part).is_dir():
            return [f"tests/{part}"]
    raise SystemExit(f"mutants: no tests are known of {module!r}: give --tests")


def by_likelihood(tests: list[str], path: str) -> list[list[str]]:
    """Return the test files in two groups, the likelier to notice a change of the source file first."""
    found = [ROOT / each for each in tests]
    files = [file for each in found for file in (sorted(each.rglob("test_*.py")) if each.is_dir() else [each])]
    stem, dotted = Path(path).stem, path.removeprefix("src/").removesuffix(".py").replace("/", ".")

    def rank(file: Path) -> int:
        text = file.read_text(encoding="utf-8")
        package, _, name = dotted.rpartition(".")
        imported = re.search(rf"{re.escape(dotted)}\b|from {re.escape(package)} import .*\b{name}\b", text)
        return 0 if stem in file.stem else 1 if imported else 2

    ranks = {file: rank(file) for file in dict.fromkeys(files)}
    ordered = sorted(ranks, key=lambda file: ranks[file])
    first = [str(file.relative_to(ROOT)) for file in ordered if ranks[file] < 2]
    return [group for group in (first, [str(file.relative_to(ROOT)) for file in ordered[len(first) :]]) if group]


def command_of(pytest: list[str], groups: list[list[str]]) -> list[str]:
    """Return the command that runs groups of tests one after the other; 5 is pytest's status where none is selected."""
    return ["sh", "-c", " && ".join(f"{{ {shlex.join(pytest + group)} || [ $? = 5 ]; }}" for group in groups)]


def copy_tree(folder: Path) -> None:
    """Copy the tracked files, as they are in the working tree, and link the packages of Node that tests use."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for packages in (*ROOT.glob("tests/*/node_modules"), *ROOT.glob("tests/*/*/node_modules")):
        (folder / packages.relative_to(ROOT)).symlink_to(packages.resolve())


def annotations_of(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return begin and end, (line, column), of each annotation."""
    nodes = []
    for node in ast.walk(ast.parse(source)):
        nodes += [getattr(node, name, None) for name in ("annotation", "returns")]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if isinstance(node, ast.expr)
    ]


def listed(table: str) -> list[dict[str, Any]]:
    """Return the entries of a table of equivalent.toml."""
    entries: list[dict[str, Any]] = tomllib.loads((ROOT / RESULTS / "equivalent.toml").read_text("utf-8")).get(
        table, []
    )
    return entries


def left_out(path: str, source: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Return first and last line and the entry of each function or class of a file that only a GPU runs."""
    spans = {}
    for node in ast.parse(source).body:
        for name, each in [("", node)] + [
            (f"{getattr(node, 'name', '')}.", inner) for inner in getattr(node, "body", [])
        ]:
            if isinstance(each, ast.FunctionDef | ast.ClassDef):
                spans[name + each.name] = each.lineno, each.end_lineno or 0
    found = []
    for entry in listed("left_out"):
        if entry["file"] == path.removeprefix(f"{SOURCES}/"):
            if missing := [name for name in entry.get("names", []) if name not in spans]:
                raise SystemExit(f"mutants: equivalent.toml leaves out {missing}, which {path} has not")
            found += [(*spans[name], entry) for name in entry["names"]] if "names" in entry else [(0, 10**9, entry)]
    return found


def draw(db: WorkDB, folder: Path, options: argparse.Namespace) -> tuple[list[WorkItem], dict[str, object]]:
    """Return one mutant of each of so many places in the database, and the numbers of places and mutants."""
    without: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
    omitted: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    places: dict[tuple[str, tuple[int, int]], list[WorkItem]] = {}
    annotated: dict[str, list] = {}
    for item in sorted(db.work_items, key=lambda item: str(item.mutations[0])):
        mutation = item.mutations[0]
        path, start = str(mutation.module_path), tuple(mutation.start_pos)
        if path not in annotated:
            text = (folder / path).read_text(encoding="utf-8")
            annotated[path] = annotations_of(text)
            without[path] = [] if options.gpu else left_out(path, text)
        if any(begin <= start < end for begin, end in annotated[path]):
            continue
        if why := next((entry["why"] for first, last, entry in without[path] if first <= start[0] <= last), ""):
            omitted.setdefault((path.removeprefix(f"{SOURCES}/"), why), set()).add(start)
        else:
            places.setdefault((path, start), []).append(item)
    rng = random.Random(options.seed)
    drawn = [rng.choice(places[place]) for place in rng.sample(sorted(places), min(options.sample, len(places)))]
    return drawn, {
        "places": len(places), "mutants": sum(map(len, places.values())),
        "left_out": [{"file": path, "places": len(found), "why": why} for (path, why), found in omitted.items()],
    }  # fmt: skip


def described(mutation: MutationSpec, diff: str) -> dict[str, str]:
    """Return where a mutant is, and its lines before and after."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    old, new = ("\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    path = str(mutation.module_path).removeprefix(f"{SOURCES}/")
    return {"file": path, "line": str(mutation.start_pos[0]), "old": old, "new": new}


def tried(options: argparse.Namespace, source: Path, tests: list[str], parent: Path) -> dict[str, object]:
    """Test mutants in copies of the tree until the time is over; return the numbers, and those that no test noticed."""
    python = str(Path(sys.executable if options.python is None else options.python).absolute())
    ray = str(Path(sys.executable).with_name("cosmic-ray"))
    quick = ["-m", "not slow" + ("" if options.gpu else " and not gpu"), "-x", "-q", "-p", "no:cacheprovider"]
    folders = [parent / str(number) for number in range(options.jobs)]
    limit_s = 0.0

    def pytest_in(folder: Path) -> list[str]:
        environment = ["env", f"PYTHONPATH={folder / 'src'}", "OMP_NUM_THREADS=1", f"TMPDIR={folder / 'tmp'}"]
        return [*environment, python, "-m", "pytest", *quick]

    def configure(folder: Path, command: str) -> None:
        (folder / "mutants.toml").write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(str(source))}\ntimeout = {limit_s:.1f}\nexcluded-modules = []\n"
            f"test-command = {json.dumps(command)}\n[cosmic-ray.distributor]\nname = 'local'\n"
        )

    parent.chmod(0o755)  # PostgreSQL, which tests start, runs as another user
    for folder in folders:
        copy_tree(folder)
        (folder / "tmp").mkdir()
        if folder == folders[0]:
            began = time.monotonic()
            if subprocess.run(command_of(pytest_in(folder), [tests]), cwd=folder).returncode:
                raise SystemExit("mutants: the tests fail without a mutant")
            limit_s = 30.0 + 3.0 * (time.monotonic() - began)
        configure(folder, "true")
    sessions = [str(folder / "mutants.sqlite") for folder in folders]
    subprocess.run([ray, "init", "mutants.toml", sessions[0]], cwd=folders[0], check=True)
    with use_db(sessions[0], WorkDB.Mode.open) as db:
        drawn, numbers = draw(db, folders[0], options)
        db.clear()
    for session in sessions[1:]:
        shutil.copy2(sessions[0], session)
    print(f"{source}: {len(drawn)} of {numbers['mutants']:,} mutants in {numbers['places']:,} places", flush=True)
    until = time.monotonic() + 60 * options.minutes
    left = iter(drawn)  # the order is random: those until the end of the time are a sample, too

    def work(folder: Path, session: str) -> None:
        while time.monotonic() < until and (item := next(left, None)) is not None:
            with use_db(session, WorkDB.Mode.open) as db:
                db.add_work_items([item])
            path = str(item.mutations[0].module_path)
            configure(folder, shlex.join(command_of(pytest_in(folder), by_likelihood(tests, path))))
            began = time.monotonic()
            subprocess.run([ray, "exec", "mutants.toml", session], cwd=folder, check=True)
            with use_db(session, WorkDB.Mode.open) as db:
                outcome = next(result.test_outcome for job, result in db.results if job == item.job_id)
            at, took = item.mutations[0].start_pos[0], time.monotonic() - began
            print(f"{path.removeprefix(f'{SOURCES}/')}:{at} {outcome.value} in {took:.0f} s", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, folders, sessions))
    return numbers | judged(sessions)


def judged(sessions: list[str]) -> dict[str, object]:
    """Return the numbers of the mutants that sessions have tested, and those that no test noticed."""
    results = []
    for session in sessions:
        with use_db(session, WorkDB.Mode.open) as db:
            where = {item.job_id: item.mutations[0] for item in db.work_items}
            results += [(where[job], result) for job, result in db.results]
    reasons = {(each["file"], each["old"], each["new"]): each["why"] for each in listed("mutant")}
    alive = [described(at, each.diff or "") for at, each in results if each.test_outcome != TestOutcome.KILLED]
    for each in alive:
        each["equivalent"] = reasons.get((each["file"], each["old"], each["new"]), "")
    killed, equivalent = len(results) - len(alive), sum(bool(each["equivalent"]) for each in alive)
    return {
        "sample": len(results), "killed": killed, "timeouts": sum(each.output == "timeout" for _, each in results),
        "equivalent": equivalent, "killed_share": round(killed / max(1, len(results) - equivalent), 4),
        "survivors": sorted(alive, key=lambda each: (each["file"], int(each["line"]))),
    }  # fmt: skip


def main() -> None:
    """Parse the command line, run, print, and write the record."""
    parser = argparse.ArgumentParser(usage=__doc__.partition("usage: ")[2].partition("\n\n")[0])
    parser.add_argument("module", help="a file or folder of src/accelerant, as service/jobs")
    parser.add_argument("--sample", type=int, default=100, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at a time, each in a copy of the tree")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no more mutants are begun")
    parser.add_argument("--tests", help="test files and folders; default: those of TESTS in this file")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    parser.add_argument("--gpu", action="store_true", help="also the tests that need a GPU, and what only a GPU runs")
    parser.add_argument("--python", help="the Python in which accelerant's tests run")
    options = parser.parse_args()
    if min(options.sample, options.jobs) < 1 or not options.minutes > 0:
        parser.error(f"--sample, --jobs and --minutes must be above 0, got {options}")
    module = options.module.strip("/").removeprefix(f"{SOURCES}/")
    source = SOURCES / module
    source = source if (ROOT / source).exists() else source.with_suffix(".py")
    if not (ROOT / source).exists():
        raise SystemExit(f"mutants: no module {SOURCES / module}")
    tests = options.tests.split() if options.tests else tests_of(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copy is removed
    with tempfile.TemporaryDirectory(prefix="accelerant-mutants-", ignore_cleanup_errors=True) as folder:
        found = tried(options, source, tests, Path(folder).resolve())
    for each in found["survivors"]:
        print(f"\n{each['file']}:{each['line']}\n-   {each['old']}\n+   {each['new']}")
        print(f"equivalent: {each['equivalent']}" if each["equivalent"] else "no test notices")
    print(
        f"\n{module}: {found['killed']} of {found['sample']} killed, {found['equivalent']} of the others equivalent: "
        f"{found['killed_share']:.1%}"
    )
    for each in found["left_out"]:
        print(f"left out: {each['places']} places of {each['file']}: {each['why']}")
    if options.record is not None:
        tool = f"cosmic-ray {importlib.metadata.version('cosmic-ray')}"
        about = {"module": module, "tests": tests, "tool": tool, "date": datetime.now(UTC).date().isoformat()}
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(json.dumps(about | {"seed": options.seed} | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
