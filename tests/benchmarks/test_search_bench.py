"""benchmarks.search: one record for each engine and filter, of searches whose answers are compared with exact ones."""

import json

import pytest

from benchmarks import search


def records(capsys, *arguments):
    search.main(["--rows", "600", "--dim", "16", "--queries", "5", "--lists", "4", "--repeats", "1", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_each_engine_and_filter_has_a_record(metric, capsys, tmp_path):
    arguments = [f"--engine={name}" for name in ("exact", "index", "torch", "numpy")]
    found = records(capsys, "--metric", metric, "--plot", str(tmp_path / "plot.svg"), *arguments)
    assert (tmp_path / "plot.svg").read_text().count("<polyline") == len(
        {each["engine"].split(" nprobe")[0] for each in found if each["recall"] is not None}
    )
    engines = {each["engine"] for each in found}
    assert {"exact", "ivf nprobe 64", "ivfpq nprobe 4"} <= engines
    assert ({"torch", "numpy"} <= engines) == (metric == "ip")
    assert all(each["ms_a_query"] >= 0 for each in found)
    assert {each["left"] for each in found} == set(search.SHARES)
    whole = [each for each in found if each["engine"] in ("exact", "torch", "numpy", "ivf nprobe 64")]
    assert all(each["recall"] == 1.0 for each in whole)


def test_peers_are_measured_or_said_to_be_missing(capsys):
    found = records(capsys, "--engine=faiss", "--engine=qdrant")
    notes = [each["note"] for each in found if "note" in each]
    assert all("not installed" in note for note in notes)
    assert all(each["recall"] > 0.99 for each in found if "Flat, blas" in each.get("engine", ""))


def test_glosses_are_the_definitions_of_wordnet(tmp_path):
    lines = [
        "  1 This software",
        "00001740 03 n 01 entity 0 000 | that which is; ",
        "00002 04 n 01 x 0 000 | that which is; ",
    ]
    (tmp_path / "data.noun").write_text("\n".join(lines))
    assert search.glosses(tmp_path) == ["that which is;"]
