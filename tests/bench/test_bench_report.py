import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from accelerant.bench import BenchmarkRecord, Environment, Row, compare
from accelerant.bench.report import build_report, write_report
from accelerant.runtime import registry
from accelerant.runtime.html_page import Bar, parts

WON = Row("neural", "gelu", "4x4 forward", "accelerant", "triton (own)", p20=0.9, p50=1.0, p80=1.2, target=1.1,
          bytes=10**6, ceiling="copy", cpu_ms=50.0, cpu_note="float32, 1 thread")  # fmt: skip
LOST = replace(WON, op="softmax", p20=3.9, p50=4.0, p80=4.2, cpu_ms=None, cpu_note="")
PEERS = [
    replace(row, runner="torch", implementation="torch", p20=1.9, p50=2.0, p80=2.1, cpu_ms=None) for row in (WON, LOST)
]
ABSENT = replace(WON, op="matmul", runner="liger", p20=None, p50=None, p80=None, note="not <installed>")
UNMET = replace(WON, op="matmul")
COPY = [
    Row("bandwidth", "host to device", f"{size} {kind}", "device", "torch copy_", p20=1, p50=p50, p80=2, bytes=10**8)
    for size, p50 in (("1 MiB", 2.0), ("1 GiB", 1.0))
    for kind in ("pinned", "pageable")
]


def record(*rows):
    found = BenchmarkRecord(Environment.of(registry.find_device("cpu")), {"copy GB/s": 10.0}, list(rows))
    found.environment = replace(found.environment, device="<Abacus> & Sons")
    found.conclude()
    return found


class Page(HTMLParser):
    """Tags that are opened and closed, and every address in them."""

    VOID = ("meta", "br", "line", "circle", "polyline", "!doctype")

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.wrong, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        return None

    def handle_endtag(self, tag):
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_whole_loads_nothing_and_escapes_what_it_is_given():
    text = build_report(record(WON, LOST, *PEERS, ABSENT, UNMET, *COPY))
    page = Page(text)
    assert page.open == []
    assert page.wrong == []
    assert page.addresses == []
    assert not re.search(r"https?://|url\(|@import|<script", text)
    assert "<Abacus>" not in text
    assert "not &lt;installed&gt;" in text
    assert "prefers-color-scheme: dark" in text
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert len(re.findall(f"{name}:", text)) == 2, f"{name} wants a light and a dark value"


def test_losses_stand_before_what_was_won_and_targets_say_what_is_unmet():
    text = build_report(record(WON, LOST, *PEERS, ABSENT, UNMET))
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "To know first", "Lost", "Neural: compared with the peers", "Share of the measured ceiling",
        "Over this machine&#39;s CPU", "Targets", "All rows", "Environment",
    ]  # fmt: skip
    lost = text[text.index("<h2>Lost") : text.index("<h2>Neural")]
    assert "softmax" in lost
    assert "0.5x the fastest peer" in lost
    assert "gelu" not in lost
    level = build_report(record(WON, replace(LOST, p20=2.0), *PEERS))
    assert "<h2>Lost" not in level
    assert "cases at least as fast as the fastest peer, 1 more level with it" in level
    facts = "".join(Page(text).texts)
    assert "1 of 2" in facts
    assert "1 of 3" in facts
    targets = text[text.index("<h2>Targets") : text.index("<h2>All rows")]
    assert targets.count("unmet") == 2
    assert "a peer did not run" in targets


def test_bandwidth_is_drawn_by_size():
    text = build_report(record(*COPY))
    assert text.count("<polyline") == 2
    assert "pinned, torch copy_" in text
    assert "<h2>Lost" not in text


def test_the_comparison_stands_in_the_page():
    now = record(replace(WON, p20=2.9, p50=3.0, p80=3.1))
    assert "1 slower" in build_report(now, compare(record(WON), now))


def test_bars_share_a_scale():
    text = str(parts().bars("a < b", [Bar("x", 1.0, "1", low=0.5, high=2.0), Bar("y", 4.0, "4", "ours")], limit=2.0))
    assert re.findall(r'class="bar [a-z]+" style="width:([\d.]+)%"', text) == ["25.00", "100.00"]
    assert 'style="left:12.50%;width:37.50%"' in text
    assert text.count('class="limit" style="left:50.00%"') == 2
    assert "a &lt; b" in text


@pytest.mark.parametrize("rows", [[], [ABSENT]])
def test_a_record_without_figures_still_makes_a_page(tmp_path, rows):
    path = tmp_path / "deep" / "report.html"
    write_report(path, record(*rows))
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    assert Page(path.read_text(encoding="utf-8")).open == []
