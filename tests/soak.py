"""Searches for a broken guarantee: short in ordinary runs; under `make soak` they last minutes, and leave a record.

A test marked `search(share)` tries random examples, drawn from the fixture `rng`, and counts them with
`record_property`. Ordinary runs call it once, with the same examples each time. `make soak` (SOAK_MINUTES) calls it
with others again and again for its share of the time, then runs as many of the tests marked `soak` as fit.
Counts of a test are added up; of a float, the largest is kept. SOAK_RECORD is the file that gets them if no test fails.
"""

import json
import os
import platform
import random
import subprocess
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from accelerant._version import __version__
from accelerant.bench.record import installed_version
from accelerant.runtime.files import write_atomic
from accelerant.runtime.host import processor_name

MINUTES = float(os.environ.get("SOAK_MINUTES") or 0)
"""Minutes that the run lasts; 0 if it is not a soak."""

SEARCHES = 0.75
"""Part of the time that searches have. Most take a little longer: the last call may begin at the last moment."""

LONGEST_S = 480
"""Longest time of one search: a test that takes 600 s counts as one that hangs, and as a failure."""

BEGAN = float(os.environ.setdefault("SOAK_BEGAN", str(time.time())) if MINUTES else 0)  # workers inherit it
PACKAGES = ("torch", "numpy", "llvmlite", "safetensors", "hypothesis", "pytest")


@pytest.fixture
def rng():
    """Random numbers, the same in every run but for a soak."""
    return random.Random(None if MINUTES else 0)


def share(item):
    """Return the share of a search, 0 of another test."""
    mark = item.get_closest_marker("search")
    return mark.args[0] if mark else 0


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(items):
    """Sort a soak: searches, the longest first, then the modules of other tests in random order."""
    if not MINUTES:
        return
    order = defaultdict(random.Random(BEGAN).random)
    items.sort(key=lambda item: (-share(item), order[item.path]))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    unit_s = 60 * MINUTES * SEARCHES * workers / max(1, sum(map(share, items)))
    for item in items:
        item.search_s = min(unit_s * share(item), LONGEST_S)


def pytest_runtest_setup(item):
    if MINUTES and not share(item) and time.time() > BEGAN + 60 * MINUTES:
        pytest.skip("the soak's time is up")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Call a search again and again, while its time lasts."""
    if not MINUTES or not share(pyfuncitem):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    until = time.monotonic() + pyfuncitem.search_s
    while True:
        pyfuncitem.obj(**arguments)
        if time.monotonic() > until:
            return True


def added(properties):
    """Return counts by name: integers added up, of floats the largest."""
    found = {}
    for name, value in properties:
        found[name] = max(found.get(name, value), value) if isinstance(value, float) else found.get(name, 0) + value
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item):
    item.user_properties[:] = added(item.user_properties).items()


def commit():
    """Return the commit, with "-dirty" if files differ from it; "" without git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def results(stats):
    """Return what each search counted, and what became of the other tests."""
    searches, others = {}, {"passed": 0, "failed": 0, "left out": 0, "seconds": 0.0}
    for outcome, reports in stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            if "search" in report.keywords:
                name = report.nodeid.partition("[")[0]
                row = searches.setdefault(name, {"cases": 0, "failed": 0, "seconds": 0.0, "counts": {}})
                if report.when == "teardown":
                    row["cases"] += 1
                    row["counts"] = added([*row["counts"].items(), *report.user_properties])
            else:
                row = others
                row["passed"] += outcome == "passed" and report.when == "call"
                row["left out"] += outcome == "skipped" and "time is up" in str(report.longrepr)
            row["failed"] += outcome in ("failed", "error")
            row["seconds"] += report.duration
    for row in (*searches.values(), others):
        row["seconds"] = round(row["seconds"], 1)
    return dict(sorted(searches.items())), others


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Print what searches counted; write the record of a soak in which nothing failed."""
    searches, others = results(terminalreporter.stats)
    for name, row in searches.items():
        counts = ", ".join(f"{value:,} {what}" for what, value in row["counts"].items())
        terminalreporter.write_line(f"{name}: {counts or 'nothing counted'} in {row['seconds']:.0f} s")
    path = os.environ.get("SOAK_RECORD")
    if not MINUTES or not path or "PYTEST_XDIST_WORKER" in os.environ:  # workers have a summary of their own
        return
    if exitstatus:
        terminalreporter.write_line(f"{path} is left as it was: this soak failed or was interrupted")
        return
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "system": platform.platform(terse=True)},
        "versions": {
            "accelerant": __version__,
            "python": platform.python_version(),
            **{name: installed_version(name) for name in PACKAGES},
        },
        "processes": config.getoption("numprocesses", None) or 1,
        "minutes": round((time.time() - BEGAN) / 60, 1),
        "searches": searches,
        "other tests": others,
    }
    write_atomic(Path(path), (json.dumps(record, indent=1) + "\n").encode())
    terminalreporter.write_line(f"record: {path}")
