"""The README's chart, its badges and the tables of its figures are what the committed records give."""

import xml.etree.ElementTree as ET

import pytest

from accelerant.bench import BenchmarkRecord, Environment, Row
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from benchmarks import readme_chart
from benchmarks.readme_chart import Bar, Panel


@pytest.mark.slow  # reads all records
def test_pictures_and_sections_are_those_of_the_records():
    for path, text in readme_chart.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m benchmarks.readme_chart"


def test_bars_are_as_long_as_the_speed_and_texts_are_escaped():
    bars = (Bar("a < b", 50.0, "50 tokens/s"), Bar("ours", 100.0, "100 tokens/s", ours=True))
    image = ET.fromstring(readme_chart.draw([Panel("Train & test", "here", "r", bars)], readme_chart._DARK, 2))
    rects = [rect.attrib for rect in image.iter("{http://www.w3.org/2000/svg}rect") if rect.attrib["class"] != "card"]
    assert [rect["class"] for rect in rects] == ["peer", "mine"]
    assert float(rects[1]["width"]) == 2 * float(rects[0]["width"])
    texts = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
    assert "Train & test" in texts
    assert "a < b" in texts


def test_a_page_without_its_marks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"page\.md needs a line '<!-- chart: .*' and after it '<!-- chart ends -->'"):
        readme_chart._replaced("text", "chart", "new", tmp_path / "page.md")


def test_plain_calls_that_miss_their_target_come_first():
    won = Row("user", "gelu", "8x8@8 host time", "accelerant", "accelerant", p20=1.0, p50=1.0, p80=1.0, target_x=1.0)
    lost = Row(
        "user", "msm", "2^20", "accelerant", "accelerant", p50=30.0, p20=30.0, p80=30.0, target=10.0, device_ms=8.0
    )
    rows = [won, Row("user", "gelu", won.case, "torch", "torch", p20=2.0, p50=2.0, p80=2.0), lost]
    rows.append(Row("user", "gelu", won.case, "liger", "liger", note="not installed"))
    record = BenchmarkRecord(Environment.of(registry.find_device("cpu")), {}, rows, ["stopped by its time limit"])
    record.conclude()
    assert readme_chart._user_section(record).splitlines()[2:] == [
        "| msm 2^20 | accelerant | 30 ms | 8 ms |  |  |  | 10 ms | no |",
        "| gelu 8x8 host time | accelerant | 1 ms |  | 2 ms |  | did not run | 1.00x the best | yes |",
        "",
        "- stopped by its time limit",
    ]
