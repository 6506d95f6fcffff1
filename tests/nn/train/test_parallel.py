"""Data parallel training: two processes over gloo do what one does with the same batches."""

import re

import pytest
import torch
import torch.distributed as dist
from parallel_workers import (
    ROWS,
    diverged,
    fitted,
    flat,
    hooked,
    interrupted,
    launch,
    net,
    penalised,
    rows,
    scaled,
    share_without_room,
    stepped,
    tied,
)

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn.train import TrainConfig
from accelerant.nn.train.data import make_source
from accelerant.nn.train.parallel import GradientReduction, share_of
from accelerant.runtime.processes import PeerMemory, Processes
from refusals import assert_raises

two = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


def every(rank, folder):
    """All cases of two processes, one after the other: a launch takes seconds."""
    return {
        "fit": fitted(rank),
        "three": fitted(rank, accumulate=1, batch_size=6),
        "bfloat16": fitted(rank, reduce_dtype="bfloat16"),
        "whole": fitted(rank, dropout=0.1, checkpoint_every=4, out=f"{folder}/whole"),
        "stopped": fitted(rank, dropout=0.1, stop_at=3, out=f"{folder}/stopped"),
        "resumed": fitted(rank, dropout=0.1, out=f"{folder}/stopped", resume=True),
        "step": stepped(rank, 2, 2),
        "weighed": stepped(rank, 2, 3, weighed=True, bucket_bytes=600),
        "wrapped": stepped(rank, 2, 3, weighed=True, wrapped=True),
        "scaled": scaled(rank),
        "seen": seen(rank),
        "diverged": diverged(rank),
        "tied": tied(rank),
        "penalized": penalised(rank),
        "hooked": hooked(rank),
        "interrupted": interrupted(rank),
    }


def seen(rank):
    """The rows of two epochs of each kind of data, in this process."""
    x = torch.arange(ROWS).reshape(-1, 1)
    dataset = torch.utils.data.TensorDataset(x)
    config = TrainConfig(batch_size=8, accumulate=2, seed=3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=6, shuffle=True)
    found = {}
    for name, data in (("arrays", x), ("dataset", dataset), ("loader", loader)):
        source = make_source(data, None, config)
        steps = source.steps(2)
        parts = [part[0].flatten().tolist() for step in source.batches(range(steps), {}, pin=False) for part in step]
        found[name] = [parts[: len(parts) // 2], parts[len(parts) // 2 :]]
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    found = launch(every, folder, str(folder))
    assert all(isinstance(each, dict) for each in found), found
    return found


def close(found, wanted, atol=1e-6):
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(here), torch.tensor(there), rtol=0, atol=atol)


@two
@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [("fit", {}), ("three", {"accumulate": 1, "batch_size": 6})])
def test_fit_is_that_of_one_process(both, name, changes):
    """Losses, clipped norms and evaluations, with micro-batches and with targets that are ignored unevenly."""
    one = fitted(0, **changes)
    for each in both:
        for key in ("losses", "norms", "parameters", "evaluations"):
            close(each[name][key], one[key])
    assert both[0][name]["parameters"] == both[1][name]["parameters"]  # the same bits
    assert max(one["norms"]) > 0.3  # clipped


@two
@pytest.mark.slow
def test_sums_in_bfloat16_are_close(both):
    losses, exact = both[0]["bfloat16"]["losses"], both[0]["fit"]["losses"]
    close(losses, exact, atol=5e-3)  # gradients are rounded to 8 bits
    assert losses != exact
    assert both[0]["bfloat16"]["parameters"] == both[1]["bfloat16"]["parameters"]


@two
@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_without_an_interruption(both):
    for each in both:
        assert (each["stopped"]["status"], each["stopped"]["steps"]) == ("stopped", 3)  # by rank 1 alone
        assert each["resumed"]["parameters"] == each["whole"]["parameters"]
    assert both[0]["resumed"]["losses"] == both[0]["whole"]["losses"]


@two
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("step", {"accumulate": 2}), ("weighed", {"accumulate": 3})])
def test_a_step_is_that_of_one_process(both, name, options):
    """With a layer that no process uses, and one that a process uses at times."""
    one = stepped(0, 1, options["accumulate"], weighed=name == "weighed")
    for each in both:
        close(each[name]["results"], one["results"])
        close([each[name]["parameters"]], [one["parameters"]])
        assert each[name]["unused"]
        for here, there in zip(each[name]["gradients"], one["gradients"], strict=True):
            assert (here is None) == (there is None)
            if here is not None:
                close([here], [there])
    assert both[0]["weighed"]["early"][-1] > 1  # sums that began during the backward pass


@two
@pytest.mark.slow
def test_a_ddp_model_is_reduced_once(both):
    one = stepped(0, 1, 3, weighed=True)
    for each in both:
        close(each["wrapped"]["results"], one["results"])
        close([each["wrapped"]["parameters"]], [one["parameters"]])


@two
@pytest.mark.slow
def test_an_overflow_in_one_process_skips_the_step_in_all(both):
    assert both[0]["scaled"] == both[1]["scaled"]
    assert both[0]["scaled"]["scales"] == [[16.0, 0.0, True], [8.0, 1.0, False], [8.0, 1.0, True]]
    assert scaled(0)["scales"] == both[0]["scaled"]["scales"]  # one process, which is also the last


@two
@pytest.mark.slow
def test_a_divergence_of_one_process_is_found_by_all(both):
    found = [each["diverged"] for each in both]
    assert re.search(r"tensor 0 of the batch is not finite \(rank [01]\); there is no checkpoint", found[0]), found
    assert found[0].partition(";")[2] == found[1].partition(";")[2]


@two
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "dataset", "loader"])
def test_an_epoch_has_each_row_once(both, kind):
    for epoch in range(2):
        parts = [each["seen"][kind][epoch] for each in both]
        assert sorted(row for part in parts for batch in part for row in batch) == list(range(ROWS))
    if kind != "loader":  # the order of one process, whose batches have the first process's rows before the second's
        alone = seen(0)[kind][0]
        assert [first + second for first, second in zip(*parts[:2], strict=True)] != alone  # another epoch
        parts = [each["seen"][kind][0] for each in both]
        assert [first + second for first, second in zip(*parts, strict=True)] == alone


class Two(Processes):
    """Rank 1 of two, without the other."""

    def __init__(self):
        self.rank, self.size = 1, 2


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch):
    assert_raises(ConfigError, r"batch_size must be a multiple of the 2 processes, got 7", share_of, 7, Two())
    monkeypatch.setattr("accelerant.nn.train.data.Processes", Two)
    x = torch.zeros(10, 2)
    assert_raises(ConfigError, r"a multiple of the 2 processes, got 5", make_source, x, None, TrainConfig(batch_size=5))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:9]), batch_size=4)
    with pytest.raises(ConfigError, match=r"a batch of 1 rows, which 2 processes cannot share"):
        make_source(loader, None, TrainConfig())
    sampler = torch.utils.data.DistributedSampler(x, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="DistributedSampler"):
        make_source(torch.utils.data.DataLoader(x, 2, sampler=sampler), None, TrainConfig())


def test_micro_batches_of_a_process_have_at_most_the_rows_of_one_alone(monkeypatch):
    monkeypatch.setattr("accelerant.nn.train.data.Processes", Two)
    for accumulate, rows_at_once, parts in ((1, 12, 1), (2, 12, 1), (4, 6, 2), (3, 6, 2), (24, 1, 12)):
        source = make_source(torch.zeros(48, 1), None, TrainConfig(batch_size=24, accumulate=accumulate))
        assert (source.microbatch, source.accumulate) == (rows_at_once, parts), accumulate


def test_buckets_hold_every_parameter_once_and_begin_small():
    params = list(torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(8)]).parameters())
    params += [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), torch.nn.Parameter(torch.zeros(()))]
    reduction = GradientReduction(params, Two(), bucket_bytes=1 << 20)
    reduction._arrange(reversed(range(len(params))))
    held = [index for bucket in reduction._buckets for index in bucket.indices]
    assert sorted(held) == list(range(len(params)))
    assert {bucket.dtype for bucket in reduction._buckets} == {torch.float32, torch.float64}
    assert all(offset % 64 == 0 for bucket in reduction._buckets for offset in bucket.offsets)
    with pytest.raises(ConfigError, match=r"reduce_dtype must be float32 or bfloat16, got torch.float16"):
        GradientReduction(params, Two(), dtype=torch.float16)
    assert_raises(ConfigError, "bucket_bytes must be above 0, got 0", GradientReduction, params, Two(), bucket_bytes=0)


@pytest.mark.parametrize("sizes", [(5, 64), (64, 64)])
def test_buckets_begin_with_numbers_between_gradients(sizes):
    """Memory of earlier arrays may hold NaN, for which NCCL looks with TORCH_NCCL_NAN_CHECK."""
    reduction = GradientReduction([torch.nn.Parameter(torch.zeros(size)) for size in sizes], Two())
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        for bucket in reduction._buckets:
            memory = reduction._flat(bucket)
            for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
                memory[offset : offset + sizes[index]] = 0.0
            assert memory.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_reduction_that_is_gone_leaves_no_hooks():
    model = net()
    reduction = GradientReduction(list(model.parameters()), Two())
    del reduction
    x, y = rows(4)
    torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    assert flat(model)


def test_memory_of_other_processes_is_cudas():
    with pytest.raises(UnsupportedCase, match="torch has no symmetric memory on cpu"):
        PeerMemory(64, torch.float32, torch.device("cpu"))


@pytest.mark.slow
def test_memory_that_one_process_lacks_makes_none_wait(tmp_path):
    """Nobody begins the rendezvous, which waits for all."""
    found = launch(share_without_room, tmp_path / "meeting")
    assert found == ["rank 1 cannot share 256 bytes: CUDA out of memory"] * 2


@two
def test_a_tied_table_is_summed_in_two_parts(both):
    """The output layer's while the backward pass runs, and rows that the embedding looked up at the end."""
    losses, none, _, sums = tied(0, processes=1)
    assert not any(none)
    for each in both:
        found, split, copied, found_sums = each["tied"]
        assert copied == {(8, 16)}  # that of positions: products write theirs into the buckets
        assert split == [False, *[True] * 5, False, False]
        assert found == pytest.approx(losses, rel=1e-6)
        assert found_sums == pytest.approx(sums, rel=1e-4, abs=1e-5)
    assert both[0]["tied"][3] == both[1]["tied"][3]


@two
def test_other_uses_of_a_tied_table(both):
    for each in both:
        *always, later = each["penalized"]
        for losses, whole in always:
            assert whole
            assert losses[-1] < losses[0]
        assert "has another gradient than in the first step" in later


@two
def test_a_hook_sees_the_whole_gradient_of_a_tied_table(both):
    for each in both:
        (always, never), (later, until) = each["hooked"]
        assert not any(never)
        assert until == [False, True, True, False, False]
        assert len(always) == 5
        assert len(later) == 2
        assert max(always + later) < 1e-6


@two
def test_a_step_that_raises_leaves_nothing_armed(both):
    for each in both:
        (sums, armed, _), has_gradient = each["interrupted"]
        assert (sums, armed, has_gradient) == (0, False, True)
