"""patch(graph=True) on a GPU: what ordinary loops do gives what it gives without graphs."""

import contextlib
import copy
import gc
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from patch_models import make, transformers

import accelerant as acl
from accelerant.errors import FallbackWarning
from accelerant.nn.patching import graphs
from accelerant.nn.train.step import TrainStep

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
SETTINGS = {
    "gpt2": {"n_embd": 256, "n_head": 4, "n_positions": 256},
    "bert": WIDE | {"max_position_embeddings": 256},
    "qwen3": WIDE | {"max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 64},
}


def wide(family="gpt2", **more):
    torch.manual_seed(0)
    return make(family, **SETTINGS[family], **more).cuda().train()


def ids(seed=0, rows=2, length=64):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def trained(model, steps=10, accumulate=1, amp=True, logits=False, set_to_none=True, mask=None, clip=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            x = ids(step * accumulate + part)
            more = {}
            if mask is not None:
                more["attention_mask"] = torch.ones_like(x)
                if mask == "padded" or (mask == "both" and step % 2):
                    more["attention_mask"][0, 40:] = 0
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                output = model(input_ids=x, labels=x, **more)
                loss = output.loss + output.logits.float().square().mean() if logits else output.loss
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
    return losses


def assert_same_training(one, other, **options):
    """By SGD, whose steps follow the gradients; sums in any order (attention, embedding) leave the last bits open."""
    begun = torch.nn.utils.parameters_to_vector(one.parameters()).detach().clone()
    torch.testing.assert_close(trained(other, **options), trained(one, **options), rtol=2e-3, atol=2e-3)
    a, b = (torch.nn.utils.parameters_to_vector(each.parameters()).detach() for each in (other, one))
    assert float((a - b).norm()) < 0.02 * float((b - begun).norm())


OPTIONS = [
    {}, {"accumulate": 3}, {"set_to_none": False}, {"accumulate": 2, "set_to_none": False}, {"amp": False},
    {"logits": True}, {"mask": "full"}, {"mask": "padded"}, {"mask": "both", "steps": 16},
]  # fmt: skip


CASES = [("gpt2", options) for options in OPTIONS]
CASES += [(family, OPTIONS[i]) for family in ("bert", "qwen3") for i in (0, 1, -1)]


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_training_from_graphs_is_training_without(family, options):
    model = wide(family)
    other = copy.deepcopy(model)
    acl.nn.patch(model, graph=False)
    report = acl.nn.patch(other, graph=True)
    assert_same_training(model, other, **options)
    assert (report.graphs["captured"], set(report.graphs)) == (1, {"captured", "replayed", "eager: before the capture"})
    assert report.graphs["replayed"] >= 7


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_activation_checkpointing_is_captured(family):
    model = wide(family)
    other = copy.deepcopy(model)
    for each in (model, other):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    acl.nn.patch(model, graph=False)
    report = acl.nn.patch(other, graph=True)
    assert_same_training(model, other)
    assert report.graphs["replayed"] == 7


def test_checkpointing_with_dropout_runs_eagerly():
    model = wide(resid_pdrop=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    report = acl.nn.patch(model, graph=True)
    with pytest.warns(FallbackWarning, match="recomputes activations with dropout"):
        trained(model, 5)
    assert not report.graphs["replayed"]
    assert torch.dropout(torch.ones(1000, device="cuda"), 0.5, True).mean().isfinite()


class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = torch.nn.LayerNorm(256), torch.nn.Dropout(0.5)
        self.weight = torch.nn.Parameter(torch.ones(256))
        self.waits = False

    def forward(self, x):
        if self.waits:
            x.sum().item()
        return self.drop(self.norm(x).detach() * self.weight) + 0 * self.norm(x)


def test_dropout_is_fresh_in_each_replay_and_follows_the_seed():
    net = Dropped().cuda().train()
    report = acl.nn.patch(net, graph=True)
    x = torch.randn(64, 256, device="cuda")
    masks = []
    for _ in range(8):
        net.zero_grad()
        y = net(x)
        y.sum().backward()
        torch.testing.assert_close(net.weight.grad, y.detach().sum(0))  # the backward pass has the forward's mask
        masks.append((y.detach() == 0).float())
    assert report.graphs["replayed"] == 5
    assert all(0.45 < float(mask.mean()) < 0.55 for mask in masks)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(masks))
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(net(x).detach())
    assert torch.equal(*found)


def test_gradients_outlive_the_next_forward_pass():
    """Both graphs share a memory pool."""
    model = wide()
    acl.nn.patch(model, graph=True)
    trained(model, 5)
    loss = model(input_ids=ids(1), labels=ids(1)).loss
    model(input_ids=ids(1), labels=ids(1))
    for _ in range(graphs.EAGER_CALLS + 1):
        loss = model(input_ids=ids(1), labels=ids(1)).loss
        loss.backward()
        model.zero_grad()
    output = model(input_ids=ids(1), labels=ids(1))
    output.loss.backward()
    value, kept = output.loss.item(), [param.grad.clone() for param in model.parameters()]
    for seed in (2, 3):
        model(input_ids=ids(seed), labels=ids(seed))
    assert output.loss.item() == value
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), kept, strict=True))


def test_a_failed_capture_leaves_everything_usable():
    net, model = Dropped().cuda().train(), wide()
    report, other = acl.nn.patch(net, graph=True), acl.nn.patch(model, graph=True)
    trained(model, 5)
    net.waits = True
    x = torch.randn(64, 256, device="cuda")
    for _ in range(graphs.EAGER_CALLS):
        net(x).sum().backward()
    stream = torch.cuda.current_stream()
    with pytest.warns(FallbackWarning, match="the capture failed with"):
        net(x).sum().backward()
    assert torch.cuda.current_stream() == stream
    assert report.graphs["captured"] == 0
    torch.cuda.empty_cache()
    assert 0.4 < float((net(x) == 0).float().mean()) < 0.6  # eager draws
    trained(model, 3)  # an earlier graph
    assert other.graphs["replayed"] == 5
    net.waits = False
    for _ in range(6):
        net(x).sum().backward()
    assert report.graphs["replayed"] >= 1


def generating(model, rows=1, length=20, tokens=200):
    """Tokens that follow a prompt, and tokens a second in the fastest of some runs."""
    inputs, seconds = {"input_ids": ids(rows=rows, length=length)}, []
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"]).index_fill(1, torch.tensor([0], device="cuda"), 0)
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return found, tokens / min(seconds)


@pytest.mark.parametrize("rows", [1, 4])
def test_tokens_are_generated_from_a_graph(rows, record_property):
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    model = make("llama", **sizes, num_key_value_heads=4, max_position_embeddings=512).cuda().eval()
    wanted, before = generating(model, rows)
    report = acl.nn.patch(model)
    found, after = generating(model, rows)
    record_property("tokens/s as it was", before)
    record_property("tokens/s patched", after)
    assert torch.equal(found, wanted)
    assert report.graphs["replayed"] > 500
    assert after > 2 * before


def test_replaced_and_moved_parameters_and_evaluation_between():
    model = wide()
    other = copy.deepcopy(model)
    acl.nn.patch(model, graph=False)
    report = acl.nn.patch(other, graph=True)
    for each in (model, other):
        torch.manual_seed(1)
        trained(each, 5)
        each.eval()
        each.generate(ids(length=4), max_new_tokens=3, do_sample=False, pad_token_id=0)
        each.train()
        each.load_state_dict({name: value * 1.01 for name, value in each.state_dict().items()})
        trained(each, 2)
        each.cpu().cuda()
        each.transformer.h[0].requires_grad_(False)
    assert_same_training(model, other, steps=8)
    assert report.graphs["captured"] == 2
    assert all(param.grad is None for param in other.transformer.h[0].parameters())


def test_under_distributed_data_parallel(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = wide()
        other = copy.deepcopy(model)
        acl.nn.patch(model, graph=False)
        report = acl.nn.patch(other, graph=True)
        for view in (False, True):
            wrapped = torch.nn.parallel.DistributedDataParallel(other, gradient_as_bucket_view=view)
            assert_same_training(model, wrapped, accumulate=2)
        assert report.graphs["replayed"] >= 30
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_and_accelerate_run_graphs(tmp_path, checkpointing):
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids(rows=48).cpu()]
    losses = []
    for graph in (False, True):
        model = wide("qwen3")
        report = acl.nn.patch(model, graph=graph)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, bf16=True,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert report.graphs == {"eager: before the capture": 3, "captured": 1, "replayed": 9}
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_a_step_captured_as_a_whole_contains_no_graphs_of_the_model():
    model = wide()
    report = acl.nn.patch(model, graph=True)
    optimizer = acl.nn.optim.AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(model, optimizer, lambda x: model(input_ids=x, labels=x).loss, precision=torch.bfloat16)
    losses = [float(step([(ids(),)], 1e-3).loss) for _ in range(8)]
    assert step.captured
    assert losses[-1] < losses[0] - 0.1
    assert not report.graphs["replayed"]


def varying(model, lengths, amp=True):
    """Losses of steps at these lengths, padded on the right, and the memory that they leave reserved."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []  # with more, BERT's losses jump
    for step, length in enumerate(lengths):
        x = ids(step, 8, length)
        mask = (
            torch.arange(length, device="cuda") < length - torch.arange(8, device="cuda")[:, None] * length // 16
        ).long()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = model(input_ids=x, labels=x.masked_fill(mask == 0, -100), attention_mask=mask).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return losses, torch.cuda.memory_reserved()


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert"])
def test_lengths_that_vary_run_from_few_graphs(family, amp):
    rng = random.Random(0)
    lengths = [rng.randint(40, 250) for _ in range(40)]
    model = wide(family)
    other = copy.deepcopy(model)
    acl.nn.patch(model, graph=False)
    report = acl.nn.patch(other, graph=True)
    wanted, found = varying(model, lengths, amp)[0], varying(other, lengths, amp)[0]
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    assert report.graphs["replayed"] >= 30
    captured = other.__dict__["_accelerant_patch"].graphs._captured
    assert len(captured) <= 12
    assert all(each.padding is not None for each in captured.values())


def test_graphs_of_several_lengths_hold_little_more_than_the_longest():
    held = []
    for lengths in ([256] * 6, [256, 200, 256, 200, *[40, 72, 104, 136, 168, 200, 232] * 4]):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        model = wide(n_layer=8)
        acl.nn.patch(model, graph=True)
        held.append(varying(model, lengths)[1] - before)
        graphs_of = model.__dict__["_accelerant_patch"].graphs
        assert max(lengths for _, lengths in graphs_of._captured) == (256,)
        del model, graphs_of
    assert held[1] <= 1.15 * held[0]


def test_embeddings_in_evaluation_run_from_graphs():
    model = wide("bert").eval()
    other = copy.deepcopy(model)
    report = acl.nn.patch(other, graph=True)
    rng = random.Random(0)
    for step in range(30):
        x = ids(step, 4, rng.randint(20, 250))
        with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
            torch.testing.assert_close(other(input_ids=x).logits, model(input_ids=x).logits, rtol=3e-2, atol=3e-2)
    assert report.graphs["replayed"] >= 20


def test_two_streams_have_graphs_of_their_own():
    model = wide()
    report = acl.nn.patch(model, graph=True)
    side = torch.cuda.Stream()
    for stream in (contextlib.nullcontext(), torch.cuda.stream(side)):
        torch.cuda.synchronize()
        with stream:
            trained(model, 5)
    assert report.graphs["captured"] == 2


def test_by_default_a_small_model_runs_from_graphs_and_a_large_batch_does_not():
    model = wide()
    report = acl.nn.patch(model)
    trained(model, 8)
    assert report.graphs == {"eager: before the capture": 3, "captured": 1, "replayed": 5}
    wider = torch.nn.TransformerEncoderLayer(2048, 16, 8192, 0.0, batch_first=True, device="cuda").train()
    report = acl.nn.patch(wider)
    x = torch.randn(16, 2048, 2048, device="cuda")
    for _ in range(6):
        wider(x).sum().backward()
    assert report.graphs["eager: the device does not wait for the host"] == 3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_second_backward_pass_has_the_masks_of_the_replay(dropout):
    model = wide(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    report = acl.nn.patch(model)
    trained(model, 5)
    assert report.graphs["replayed"] == 2
    loss = model(input_ids=ids(1), labels=ids(1)).loss
    loss.backward(retain_graph=True)
    first = [param.grad.clone() for param in model.parameters()]
    torch.rand(100, device="cuda")
    model.zero_grad()
    loss.backward()
    for param, grad in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=2e-3, atol=2e-4)
    before = report.graphs["replayed"]
    trained(model, 1, amp=False)
    assert report.graphs["replayed"] == before


def test_gradients_of_gradients_by_default():
    net = torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 256), torch.nn.GELU()).cuda().train()
    report = acl.nn.patch(net)
    x = torch.randn(64, 256, device="cuda")
    penalties = []
    for step in range(6):
        leaf = x.clone().requires_grad_(True)
        y = net(leaf).square().sum()
        if step < 4:
            y.backward()
            continue
        (grad,) = torch.autograd.grad(y, leaf, create_graph=True)
        penalties.append(grad.square().sum())
    assert report.graphs["replayed"] == 2
    torch.testing.assert_close(*penalties)
    net.zero_grad()
    penalties[0].backward()
    assert all(param.grad is not None for param in net.parameters())
