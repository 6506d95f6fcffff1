import functools
import itertools
import json
import logging
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from accelerant import ops
from accelerant.config import override
from accelerant.runtime.dispatch import operations
from accelerant.runtime.dispatch import race as module
from accelerant.runtime.dispatch.race import TABLES, CandidateTimes, Choices, choices, key_of, model_of, rounded

CPU = torch.device("cpu")
KEY = "probe float32 4 8"


@pytest.fixture
def model(monkeypatch):
    """A device of a model and driver that the test names."""

    def named(name="NVIDIA H200", driver="580.1"):
        monkeypatch.setattr(module, "_described", lambda device: (name, driver))
        model_of.cache_clear()
        module.versions.cache_clear()
        return name

    yield named
    model_of.cache_clear()
    module.versions.cache_clear()


def test_sizes_are_rounded_up_to_powers_of_two():
    assert rounded((0, 1, 2, 3, 1000, 1024, 1025)) == (0, 1, 2, 4, 1024, 1024, 2048)
    assert rounded((80, 129, 1), exact_to=128) == (80, 256, 1)
    assert key_of("gelu_fwd", torch.bfloat16, (8192, "none")) == "gelu_fwd bfloat16 8192 none"


def test_what_is_kept_is_found_again_by_another_process(tmp_path, model):
    model()
    times = CandidateTimes({"triton": 0.06861234, "torch": 0.0786}, "4x8 float32", "2026-11-21")
    Choices(tmp_path).keep(CPU, KEY, times)
    found = Choices(tmp_path).find(CPU, KEY)
    assert found == CandidateTimes({"triton": 0.06861, "torch": 0.0786}, "4x8 float32", "2026-11-21")
    assert Choices(tmp_path).find(CPU, "probe float32 4 16") is None
    assert [path.name for path in tmp_path.glob("*.json")] == ["NVIDIA H200.json"]
    assert not Choices(tmp_path).ignored(CPU)


def test_models_have_a_file_each_whatever_they_are_called(tmp_path, model):
    for name in ("NVIDIA H200", "AMD/Radeon: 7900\n", "..", ""):
        model(name)
        Choices(tmp_path).keep(CPU, KEY, CandidateTimes({name or "x": 1.0}))
    for name in ("NVIDIA H200", "AMD/Radeon: 7900\n", "..", ""):
        model(name)
        assert Choices(tmp_path).find(CPU, KEY).ms == {name or "x": 1.0}
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert not list(tmp_path.parent.glob("*.json"))


def test_other_names_in_the_bucket_stay_and_what_failed_goes(tmp_path, model):
    model()
    store = Choices(tmp_path)
    store.keep(CPU, KEY, CandidateTimes({"a": 1.0, "b": 2.0}, failed={"c": "no"}))
    store.keep(CPU, KEY, CandidateTimes({"c": 3.0}, failed={"b": "broke"}))
    for each in (store, Choices(tmp_path)):
        assert (each.find(CPU, KEY).ms, each.find(CPU, KEY).failed) == ({"a": 1.0, "c": 3.0}, {"b": "broke"})


def test_entries_of_other_versions_are_ignored_with_the_reason_and_kept(tmp_path, model):
    model(driver="550.2")
    Choices(tmp_path).keep(CPU, KEY, CandidateTimes({"a": 1.0}))
    model(driver="580.1")
    new = Choices(tmp_path)
    assert new.find(CPU, KEY) is None
    assert new.ignored(CPU) == ("1 entries of driver 550.2: other versions are here now",)
    new.keep(CPU, KEY, CandidateTimes({"b": 1.0}))
    assert Choices(tmp_path).find(CPU, KEY).ms == {"b": 1.0}
    model(driver="550.2")
    assert Choices(tmp_path).find(CPU, KEY).ms == {"a": 1.0}


def test_old_versions_go_in_the_end(tmp_path, model):
    for i in range(7):
        model(driver=str(i))
        Choices(tmp_path).keep(CPU, KEY, CandidateTimes({"a": 1.0}))
    (path,) = tmp_path.glob("*.json")
    drivers = [stamp["versions"]["driver"] for stamp in json.loads(path.read_text())["stamps"].values()]
    assert drivers == ["3", "4", "5", "6"]


def test_the_versions_name_what_may_change_who_wins(model):
    model()
    assert set(module.versions(CPU)) == {"torch", "triton", "driver"}
    assert module.versions(CPU)["torch"] == torch.__version__


@pytest.mark.parametrize("text", [
    "",
    '{"format": 1, "stamps": {"a": {"versions": {}, "entr',
    "[]",
    "null",
    '{"format": 1}',
    '{"format": 1, "stamps": []}',
    '{"format": 1, "stamps": {"a": 3}}',
    '{"format": 1, "stamps": {"a": {"versions": [], "entries": {}}}}',
    "\xff",
])  # fmt: skip
def test_a_torn_file_costs_a_warning_and_is_replaced(tmp_path, model, caplog, text):
    (tmp_path / f"{model()}.json").write_text(text, encoding="latin-1")
    store = Choices(tmp_path)
    with caplog.at_level(logging.WARNING, "accelerant.choices"):
        assert store.find(CPU, KEY) is None
    assert "cannot be read" in caplog.text
    assert "cannot be read" in store.ignored(CPU)[0]
    store.keep(CPU, KEY, CandidateTimes({"a": 1.0}))
    assert Choices(tmp_path).find(CPU, KEY).ms == {"a": 1.0}


def test_another_format_is_ignored_with_the_reason(tmp_path, model):
    (tmp_path / f"{model()}.json").write_text('{"format": 99, "stamps": {}}')
    assert "format 99, not 1" in Choices(tmp_path).ignored(CPU)[0]


@pytest.mark.parametrize(
    "body", ['{"ms": {"a": "fast"}}', '{"ms": {"a": -1}}', '{"ms": 3}', "[]", '{"ms": {"a": NaN}}']
)
def test_a_damaged_entry_is_as_good_as_none(tmp_path, model, body):
    model()
    store = Choices(tmp_path)
    store.keep(CPU, KEY, CandidateTimes({"a": 1.0}))
    store.keep(CPU, "sound", CandidateTimes({"a": 1.0}))
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    (stamp,) = content["stamps"].values()
    stamp["entries"][KEY] = json.loads(body)
    path.write_text(json.dumps(content))
    assert Choices(tmp_path).find(CPU, KEY) is None
    assert Choices(tmp_path).find(CPU, "sound") is not None


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, model, caplog):
    model()
    (tmp_path / "file").write_text("")
    store = Choices(tmp_path / "file" / "choices")
    with caplog.at_level(logging.WARNING, "accelerant.choices"):
        store.keep(CPU, KEY, CandidateTimes({"a": 1.0}))
    assert "cannot be kept" in caplog.text
    assert store.find(CPU, KEY).ms == {"a": 1.0}  # this process knows it all the same


def _keep(root, i):
    module._described = lambda device: ("NVIDIA H200", "580.1")
    for j in range(5):
        Choices(Path(root)).keep(CPU, f"probe {i} {j}", CandidateTimes({"a": 1.0}))


@pytest.mark.skipif(os.name != "posix", reason="elsewhere files are not locked, and a result may be lost")
def test_processes_that_write_at_once_lose_nothing(tmp_path, model):
    model()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_keep, args=(tmp_path, i)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sum(not each.table for each in Choices(tmp_path).entries(CPU).values()) == 15
    assert not list(tmp_path.glob(".new-*"))


# --- shipped tables --------------------------------------------------------------------------------------------------
@pytest.fixture
def tables(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    body = {
        "format": 1,
        "device": "NVIDIA H200",
        "serves": ["NVIDIA H200", "NVIDIA H100"],
        "entries": {KEY: {"ms": {"triton": 1.0, "torch": 2.0}, "case": "4x8 float32", "date": "2026-11-21"}},
    }
    (folder / "nvidia-h200.json").write_text(json.dumps(body))
    (folder / "a-torn.json").write_text("{")
    return folder


@pytest.mark.parametrize(("name", "served"), [
    ("NVIDIA H200", True), ("NVIDIA H200 NVL", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 PCIe", True),
    ("NVIDIA H200 MIG 1g.18gb", False), ("NVIDIA H20", False), ("NVIDIA A100-SXM4-80GB", False),
])  # fmt: skip
def test_a_shipped_table_serves_its_models(tmp_path, tables, model, name, served):
    model(name)
    found = Choices(tmp_path / "local", tables).find(CPU, KEY)
    assert (found is not None) == served
    if found:
        assert found.table == "NVIDIA H200"


@pytest.mark.parametrize(("name", "times"), [("NVIDIA H200", (1.0, 4.0)), ("NVIDIA H100", (3.0, 4.0))])
def test_the_table_of_the_model_itself_goes_before_others(tmp_path, tables, model, name, times):
    """Both serve both models; each has the entries that the other lacks."""
    model(name)
    entries = {key: {"ms": {"triton": ms}} for key, ms in ((KEY, 3.0), ("probe float16 4 8", 4.0))}
    body = {"format": 1, "device": "NVIDIA H100", "serves": ["NVIDIA H100", "NVIDIA H200"], "entries": entries}
    (tables / "nvidia-h100.json").write_text(json.dumps(body))
    store = Choices(tmp_path / "local", tables)
    assert tuple(store.find(CPU, key).ms["triton"] for key in entries) == times


def test_local_results_come_before_shipped_ones(tmp_path, tables, model):
    model()
    store = Choices(tmp_path / "local", tables)
    store.keep(CPU, KEY, CandidateTimes({"torch": 1.0}))
    assert store.find(CPU, KEY).table == ""
    assert store.find(CPU, KEY).ms == {"torch": 1.0}


def test_a_table_is_made_of_local_results(tmp_path, tables, model):
    model()
    store = Choices(tmp_path / "local", tables)
    store.keep(CPU, "probe float32 16", CandidateTimes({"torch": 1.0}, "9"))
    body = store.table(CPU, serves=["NVIDIA H100"])
    assert (body["device"], body["serves"]) == ("NVIDIA H200", ["NVIDIA H200", "NVIDIA H100"])
    assert list(body["entries"]) == ["probe float32 16"]
    (tables / "nvidia-h200.json").write_text(json.dumps(body))
    assert Choices(tmp_path / "elsewhere", tables).find(CPU, "probe float32 16").table == "NVIDIA H200"


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.name)
def test_the_tables_of_the_package_can_be_read(path):
    body = json.loads(path.read_text(encoding="utf-8"))
    assert body["format"] == 1
    assert body["device"] in body["serves"]
    for key, entry in body["entries"].items():
        assert CandidateTimes.read(entry).ms, key


def test_the_store_follows_the_cache_folder(tmp_path):
    with override(cache_dir=tmp_path):
        assert choices().root == tmp_path / "choices"
        assert choices() is choices()
    assert choices().root != tmp_path / "choices"


# --- the sources of an op --------------------------------------------------------------------------------------------
@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one op: `digest` after a change of one of its files."""
    folder = tmp_path / "ops" / "probe"
    folder.mkdir(parents=True)
    (tmp_path / "ops" / "_tiles.py").write_text("BLOCK = 4\n")
    (folder / "launch.py").write_text(
        '"""Launches."""\nfrom accelerant.ops._tiles import BLOCK\n\n\ndef run():\n    return BLOCK\n'
    )
    for name in ("kernel.c", "kernel.cuh", "kernel.cu"):
        (folder / name).write_text("int f(int x) { return x; } /* same */\n")
    (tmp_path / "ops" / "other.py").write_text("x = 1\n")
    monkeypatch.setattr(module, "_ROOT", tmp_path)

    def run():
        pass

    run.__module__ = "accelerant.ops.probe.launch"

    def digest(name="", text=""):
        if name:
            (tmp_path / "ops" / name).write_text(text)
        for cached in (module._imports, module._tree, module._stripped):
            cached.cache_clear()
        return module.Sources([functools.partial(run, 1)])()

    yield digest
    for cached in (module._imports, module._tree, module._stripped):
        cached.cache_clear()


@pytest.mark.parametrize("name", ["probe/kernel.c", "probe/kernel.cuh", "probe/kernel.cu"])
def test_a_changed_kernel_changes_the_digest_and_a_comment_does_not(package, name):
    before = package()
    assert package(name, "int f(int x)   { return x; } // other words\n") == before
    assert package(name, "int f(int x) { return x + 1; }\n") != before


def test_a_docstring_or_another_op_does_not_change_the_digest_and_an_import_does(package):
    before = package()
    assert package("other.py", "x = 2\n") == before
    body = 'from accelerant.ops._tiles import BLOCK\n\ndef run():\n    """Run."""\n    return BLOCK  # 4\n'
    words = f'"""Other words."""\n{body}'
    assert package("probe/launch.py", words) == before
    assert package("_tiles.py", '"""Tiles."""\nBLOCK = 4\n') == before
    assert package("_tiles.py", "BLOCK = 8\n") != before


def test_a_measurement_of_other_sources_is_not_used_and_is_replaced(tmp_path, model):
    model()
    store = Choices(tmp_path)
    store.keep(CPU, KEY, CandidateTimes({"a": 1.0}, sources="old"))
    assert Choices(tmp_path).find(CPU, KEY, lambda: "old").ms == {"a": 1.0}
    assert Choices(tmp_path).find(CPU, KEY, lambda: "new") is None
    store.keep(CPU, KEY, CandidateTimes({"b": 1.0}, sources="new"))
    assert Choices(tmp_path).find(CPU, KEY, lambda: "new").ms == {"b": 1.0}


def test_the_sources_of_an_op_are_its_own():
    from accelerant.ops import norm

    files = module._closure([norm.__name__])
    names = {path.relative_to(module._ROOT).as_posix() for path in files}
    assert {"ops/norm/__init__.py", "ops/norm/triton_kernels.py", "ops/_launch.py"} <= names
    assert not any(name.startswith(("ops/softmax", "runtime")) for name in names)


NO_CHOICE = {("conv2d_fwd", "float32"), ("linear_gelu_fwd", "float32")}
"""Torch's implementation alone serves these."""

UNTUNED = {
    *itertools.product(("linear_int4_fwd",), ("bfloat16", "float16", "float32")),
    *itertools.product(("attention_paged_fwd",), ("float16", "float32")),
}
"""No GPU was tuned since these are there: the first implementation that takes a case runs."""


def test_every_op_is_in_the_shipped_tables():
    tables = [json.loads(path.read_text(encoding="utf-8"))["entries"] for path in TABLES.glob("*.json")]
    measured = {tuple(key.split()[:2]) for table in tables for key in table}
    lacking = set()
    for name, part in itertools.product(ops.__all__, ("fwd", "bwd")):
        operation = operations().get(f"{name}_{part}")
        if operation is None or len(operation.implementations) == 1:
            continue  # nothing to choose from
        if any(implementation.mutates for implementation in operation.implementations):
            continue  # which are not raced
        lacking |= {(operation.name, dtype) for dtype in ("bfloat16", "float16", "float32")} - measured
    assert lacking == NO_CHOICE | UNTUNED
