import re
from html.parser import HTMLParser

import pytest

from accelerant.nn.train.history import StepRecord, build_report
from accelerant.runtime.html_page import Line, Reference, line_chart, render, smoothed, ticks

EVIL = "<script>alert('x')</script>&\""
SUMMARY = {
    "preset": "tiny", "device": "cpu (2 threads)", "parameters": 438_272, "steps": 3, "tokens": 3072,
    "validation_loss": 1.61, "validation_nats_per_byte": 1.61, "unigram_nats_per_byte": 3.1,
    "bigram_nats_per_byte": 2.4, "tokens_per_s": 31234.5, "peak_memory_bytes": 3 << 30, "seconds": 12.0,
}  # fmt: skip
CONFIG = {
    "run": {"recipe": {"name": "tiny", "tokenizer": "bytes"}, "seed": 0, "deterministic": True},
    "corpus": {"source": EVIL, "train_bytes": 1234567, "skipped": ["a.pdf (PDF)", "b (empty)"], "converted": []},
    "versions": {"torch": "2.13.0"},
}
LEDGER = {
    "ops": [
        {
            "op": "layer_norm",
            "implementation": "triton",
            "backend": "cuda",
            "device": "cuda:0",
            "case": "fp32 (1024, 128)",
            "calls": 12345,
            "ms_p50": None,
            "ms_total": None,
            "bytes": 5 << 20,
            "flops": 7e12,
            "fallbacks": 0,
            "refused": [{"implementation": "slow", "reason": EVIL}],
        }
    ],
    "fallbacks": [],
}


def records(count):
    return [StepRecord(n + 1, 3.0 - n / count, 1000.0, 10.0, 7, 0.1, 1.0) for n in range(count)]


def page(**changes):
    return build_report(
        **{
            "summary": SUMMARY,
            "config": CONFIG,
            "records": records(3),
            "ledger": LEDGER,
            "sample": "def f():",
            **changes,
        }
    )


class Tags(HTMLParser):
    VOID = ("meta", "line", "circle", "polyline")

    def __init__(self, html):
        super().__init__()
        self.open, self.seen, self.attributes, self.text = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_well_formed_and_says_what_was_measured():
    tags = Tags(page())
    assert tags.open == []
    for text in (
        "1.610",
        "2.400",
        "31,234",
        "3.0 GiB",
        "layer_norm",
        "12,345",
        "5.0 MiB",
        "7T",
        "def f():",
        "a.pdf (PDF); b (empty)",
    ):
        assert text in tags.text
    assert tags.seen.count("svg") == 2
    assert "converted" not in tags.text


def test_the_page_needs_nothing_from_outside():
    html = page()
    tags = Tags(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(tags.seen)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in tags.attributes}
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)


def test_text_from_outside_is_escaped():
    html = page(sample=EVIL)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 4  # the source twice, the reason, the sample
    assert EVIL in Tags(html).text


def test_a_page_without_calls_or_steps_says_so():
    tags = Tags(page(ledger={"ops": [], "fallbacks": []}))
    assert "recorded no calls" in tags.text
    fallback = {"op": "gelu", "wanted": "triton", "ran": "torch", "reason": EVIL}
    tags = Tags(page(ledger={**LEDGER, "fallbacks": [fallback]}))
    assert f"Fallbacks: op gelu, wanted triton, ran torch, reason {EVIL}" in tags.text


def test_references_are_drawn_for_bytes_only():
    assert "unigram</text>" in page()
    words = {**CONFIG, "run": {**CONFIG["run"], "recipe": {"name": "small", "tokenizer": "bpe"}}}
    assert "unigram</text>" not in page(config=words)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1.13, 1.91, [1.2, 1.4, 1.6, 1.8]), (0, 4e4, [0, 1e4, 2e4, 3e4, 4e4]), (3, 3, [3])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_smoothing_is_the_mean_of_both_sides():
    points = [(0.0, 1.0), (1.0, 3.0), (2.0, 8.0), (3.0, 0.0)]
    assert [y for _, y in smoothed(points, 3)] == pytest.approx([1.0, 4.0, 11 / 3, 0.0])
    assert smoothed(points, 1) == points


def coordinates(svg):
    (points,) = re.findall(r'points="([^"]+)"', svg)
    return [tuple(float(v) for v in pair.split(",")) for pair in points.split()]


def test_points_stand_where_their_values_are():
    svg = line_chart([Line("a", [(0, 0), (5, 10), (10, 5)], "mean")], x_label="x", y_label="y", zero=True)
    (x0, y0), (x1, y1), (x2, y2) = coordinates(svg)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.3)  # down is up in SVG


def test_long_lines_are_thinned_and_keep_their_level():
    svg = line_chart([Line("a", [(n, 7.0) for n in range(100_000)], "mean")], x_label="x", y_label="y")
    points = coordinates(svg)
    assert 250 <= len(points) <= 500
    assert len({y for _, y in points}) == 1


def test_a_single_point_is_visible_and_nothing_is_said_to_be_nothing():
    single = line_chart([Line("a", [(1, 2)], "mean")], x_label="x", y_label="y", references=[Reference("r", 5)])
    assert "<circle" in single
    assert 'class="reference"' in single
    assert "No steps" in line_chart([Line("a", [], "mean")], x_label="x", y_label="y")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e308])
def test_points_that_are_not_finite_are_left_out(value):
    points = [(1.0, 2.0), (2.0, value), (3.0, 4.0)]
    assert smoothed(points, 1) == [(1.0, 2.0), (3.0, 4.0)]
    drawn, without = (
        line_chart([Line("loss", each, "one")], x_label="step", y_label="nats") for each in (points, points[::2])
    )
    assert drawn == without


def test_the_ledgers_costliest_rows_come_first_and_the_rest_folds_away():
    rows = [{**LEDGER["ops"][0], "op": f"op{n}", "calls": 10, "ms_total": float(n)} for n in range(20)]
    tags = Tags(page(ledger={"ops": rows, "fallbacks": []}))
    assert tags.open == []
    assert re.findall(r"op\d+", tags.text) == [f"op{n}" for n in range(19, -1, -1)]
    assert "4 more cases" in tags.text


def test_each_phase_has_its_table_and_the_time_that_is_not_attributed():
    names = ("op", "implementation", "device", "case")
    part = {**{name: LEDGER["ops"][0][name] for name in names}, "calls": 345, "ms_total": 4000.0}
    phases = [{"phase": "training", "seconds": 10.0, "ops": [part]}, {"phase": EVIL, "seconds": 1.0, "ops": []}]
    html = page(ledger={**LEDGER, "phases": phases})
    tags = Tags(html)
    assert tags.open == []
    for text in (
        "training: 10 s",
        "40.0%",
        "not attributed6,00060.0%",
        f"{EVIL}: 1 s",
        "outside of phases",
        "outside of phases",
    ):
        assert text in tags.text
    assert "<script" not in html


def test_the_loss_scale_of_float16_is_a_fact():
    text = page(summary=SUMMARY | {"loss_scale": "32,768, 2 steps skipped"})
    assert "Loss scale" in text
    assert "32,768" in text
    assert "2 steps skipped" in text
    assert "Loss scale" not in page()


@pytest.mark.parametrize(("count", "shown"), [(23_008, "23,008"), (438_272, "0.4 million"), (1_500_000, "1.5 million")])
def test_small_models_have_parameters_too(count, shown):
    assert f"{shown} parameters, trained on" in page(summary=SUMMARY | {"parameters": count})


@pytest.mark.parametrize(("tokens", "shown"), [(1024, "1,024"), (999_999, "999,999"), (2_048_000, "2.05 M")])
def test_few_tokens_are_not_rounded_to_none(tokens, shown):
    assert shown in Tags(page(summary=SUMMARY | {"tokens": tokens})).text


def test_a_page_with_a_lone_surrogate_can_be_written():
    assert b"<p>a\\ud800b</p>" in render("runtime/page.html", title="a", parts=["<p>a\ud800b</p>"]).encode()
