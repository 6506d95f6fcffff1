"""The Grafana dashboard queries metrics and labels that the ledger exports."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

from accelerant.runtime.ledger import FallbackRecord, Ledger, OpRecord

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))


def queries():
    """Yield each query of the panels and variables."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"][1:]:
        yield variable["query"]["query"], ""


@pytest.fixture(scope="module")
def exported():
    """Labels of each metric that a ledger with an op, a fallback and a graph exports."""
    book = Ledger()
    record = book.record(OpRecord("gelu_fwd", "torch", "cpu", "cpu", "8 float32", own=False, calls=1))
    record.samples_ms.append(1.0)
    book.fallback(FallbackRecord("gelu_fwd", "8 float32", "triton", "torch", "no Triton"))
    book.captured("step", {})
    found = {}
    for line in book.to_prometheus().splitlines():
        if kind := re.match(r"# TYPE (\w+) ", line):
            found.setdefault(kind[1], set())
        elif sample := re.match(r"(\w+)\{(.*)\} ", line):
            found[sample[1]] |= set(re.findall(r"(\w+)=\"", sample[2]))
    return found


def test_every_metric_and_label_of_the_dashboard_is_exported(exported):
    for query, legend in queries():
        (*metrics,) = set(re.findall(r"accelerant_\w+", query))
        assert metrics, query
        for metric in metrics:
            assert metric in exported, query
            labels = set(re.findall(r"\{\{(\w+)\}\}", legend)) | set(re.findall(r"(\w+)=~", query)) - {"job"}
            assert labels <= exported[metric], f"{metric} lacks one of the labels {sorted(labels)}"


def test_panels_do_not_overlap():
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_the_page_s_server_serves_the_ledger():
    text = (DOCS / "tools.md").read_text(encoding="utf-8").partition("## Prometheus and Grafana")[2]
    program = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1].replace("9109", "0")
    names = {}
    exec(compile(program, "tools.md", "exec"), names)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{names['server'].server_port}/metrics", timeout=10) as answer:
            assert b"# TYPE accelerant_op_calls_total counter" in answer.read()
    finally:
        names["server"].shutdown()
        names["server"].server_close()
