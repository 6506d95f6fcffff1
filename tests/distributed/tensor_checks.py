"""What each process of the tests of tensor parallelism and sharding does, against one process."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import accelerant as acl
from accelerant import distributed, ops
from accelerant.distributed import vocabulary_parallel_cross_entropy
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn import layers
from accelerant.nn.optim import SGD, AdamW, clip_grad_norm_
from accelerant.nn.serving import Engine, Finished, PromptLogprobs, Sampling, Token
from accelerant.nn.train import TrainStep

LLAMA = acl.nn.LlamaConfig(
    vocab_size=96, context=64, layers=2, heads=4, kv_heads=2, width=32, hidden=48, rope_scaling=None
)
GPT = acl.nn.GPTConfig(vocab_size=97, context=64, layers=2, heads=4, width=32)
NEAR = {"rtol": 2e-5, "atol": 2e-6}


def mesh_of(*names):
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size,) if len(names) < 2 else (2, size // 2), mesh_dim_names=names or ("all",))


def llama(dtype=torch.float64, **changes):
    """The same weights in each process, with norms that are not all 1."""
    torch.manual_seed(5)
    model = acl.nn.Llama(acl.nn.LlamaConfig(**{name: getattr(LLAMA, name) for name in LLAMA.__slots__} | changes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model.to(dtype)


def tokens(rows=2, length=12, seed=1):
    drawn = torch.randint(0, 96, (2, rows, length), generator=torch.Generator().manual_seed(seed))
    return drawn[0], drawn[1]


def same_weights(model, whole, **near):
    state = distributed.whole_state_dict(model)
    assert bool(state) == (dist.get_rank() == 0)
    if state:
        expected = whole.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, msg=lambda text, n=name: f"{n}: {text}", **(near or NEAR))


# --- tensor parallel -------------------------------------------------------------------------------------------------
def cross_entropy_of_a_split_vocabulary():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        hidden, weight = torch.randn(7, 16, dtype=dtype), torch.randn(24, 16, dtype=dtype)
        targets = torch.tensor([0, 23, 5, -100, 12, 11, -100])
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        expected = ops.linear_cross_entropy(x, w, targets)
        (3 * expected).backward()
        part = weight.chunk(size)[rank].clone().requires_grad_()
        hidden.requires_grad_()
        loss = vocabulary_parallel_cross_entropy(hidden, part, targets, mesh_of())
        (3 * loss).backward()
        torch.testing.assert_close(loss.to(dtype), expected, rtol=near, atol=near)
        torch.testing.assert_close(hidden.grad, x.grad, rtol=near, atol=near)
        torch.testing.assert_close(part.grad, w.grad.chunk(size)[rank], rtol=near, atol=near)
    with pytest.raises(ConfigError, match=r"targets must be in \[0, 24\) or ignore_index \(-100\), got 24"):
        vocabulary_parallel_cross_entropy(hidden, part, targets + 1, mesh_of())


def split_llama_trains_as_one_process():
    """Losses, weights and the clipped norm over steps, tied and untied."""
    for tied in (False, True):
        one = llama(tied=tied)
        model = distributed.tensor_parallel(copy.deepcopy(one), mesh_of())
        assert model.blocks[0].attention.qkv.weight.shape == (128 // 2 // dist.get_world_size(), 32)
        idx, targets = tokens()
        torch.testing.assert_close(model(idx), one(idx), **NEAR)
        steps = [
            TrainStep(each, AdamW(each.parameters(), weight_decay=0.1), each.loss, max_grad_norm=0.5)
            for each in (model, one)
        ]
        for _ in range(4):
            ours, theirs = (step([(idx, targets)], 1e-2) for step in steps)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        same_weights(model, one)


def split_llama_generates_and_saves():
    one = llama()
    model = distributed.tensor_parallel(copy.deepcopy(one), mesh_of())
    size = dist.get_world_size()
    assert model.can_cache()
    assert model.cache_shape() == (2, 2 // size, 8)
    idx, _ = tokens(length=5)
    for options in ({"temperature": 0}, {"temperature": 0, "use_cache": False}, {"seed": 3, "top_k": 8}):
        assert torch.equal(model.generate(idx, 20, **options), one.generate(idx, 20, **options))
    torch.manual_seed(dist.get_rank())  # without a seed every process draws the first one's tokens
    drawn = model.generate(idx, 8)
    everybody = [torch.empty_like(drawn) for _ in range(size)]
    dist.all_gather(everybody, drawn)
    assert all(torch.equal(each, drawn) for each in everybody)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    model.save_pretrained(folders[0])
    again = acl.nn.Llama.from_pretrained(Path(folders[0]))
    for (name, a), b in zip(again.state_dict().items(), one.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ConfigError, match=r"tokens must be in \[0, 96\), got 96"):
        model(torch.full((1, 2), 96))


def split_kin_of_llama_compute_as_one_process():
    """Biases of qkv, norms of heads and windows: logits, gradients, generation, and the weights joined again."""
    for changes in ({"qkv_bias": True}, {"qk_norm": True, "head_width": 12}, {"window": 3, "tied": True}):
        one = llama(**changes)
        for block in one.blocks:
            if block.attention.qkv.bias is not None:
                nn.init.normal_(block.attention.qkv.bias, 0.0, 0.3)
        model = distributed.tensor_parallel(copy.deepcopy(one), mesh_of())
        idx, targets = tokens()
        torch.testing.assert_close(model(idx), one(idx), **NEAR)
        for each in (model, one):
            each.loss(idx, targets).backward()
        named = dict(one.named_parameters())
        for name, parameter in model.named_parameters():
            if "norm" in name:  # which are not split
                torch.testing.assert_close(parameter.grad, named[name].grad, **NEAR)
        assert torch.equal(model.generate(idx, 12, temperature=0), one.generate(idx, 12, temperature=0))
        same_weights(model, one)


def split_integers_compute_as_one_process():
    for changes in ({}, {"qkv_bias": True, "tied": True}):
        one = acl.nn.quantize(llama(torch.float32, **changes), skip=()).model
        model = distributed.tensor_parallel(copy.deepcopy(one), mesh_of())
        assert model.blocks[0].attention.qkv.weight_int8.shape == (64 // dist.get_world_size(), 32)
        idx, _ = tokens()
        torch.testing.assert_close(model(idx), one(idx), rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(idx, 12, temperature=0), one.generate(idx, 12, temperature=0))
        answers = []
        for each in (model, one):  # every process takes the same steps
            engine = Engine(each, 8, 16, start=False)
            answer = engine.submit(idx[0].tolist(), Sampling(temperature=0), max_tokens=8)
            while engine.step():
                pass
            answers.append([event.id for event in answer if not isinstance(event, Finished)])
        assert answers[0] == answers[1]
        with pytest.raises(UnsupportedCase, match="in integers that is split"):
            distributed.whole_state_dict(model)


def split_engine_is_followed():
    """Of the processes one plans and draws, and the others compute their parts of its steps, drafts and prompts too."""
    one, told = llama(torch.float32), []
    model = distributed.tensor_parallel(copy.deepcopy(one), mesh_of())

    def share(*step):
        told.append(step[0])
        dist.broadcast_object_list([step])

    def steps():
        while True:
            dist.broadcast_object_list(received := [None])
            if received == [None]:
                return
            yield received[0]

    if dist.get_rank():
        Engine(model, 12, 7, start=False, speculate=2).follow(steps())
        return
    idx = tokens(length=20)[0][0].tolist()
    answers = []
    for each, sharing in ((model, share), (one, None)):
        with Engine(each, 12, 7, start=False, speculate=2, share=sharing) as engine:
            requests = [engine.submit(idx[:n], Sampling(0.8), max_tokens=9, seed=n, prompt_logprobs=0) for n in (20, 5)]
            while engine.step():
                pass
            events = [event for answer in requests for event in answer]
        answers.append([event.id for event in events if isinstance(event, Token)])
        scores = [value for event in events if isinstance(event, PromptLogprobs) for value in event.logprobs]
        assert scores == pytest.approx(score_prompts(one, (idx, idx[:5])), abs=1e-4)
    dist.broadcast_object_list([None])
    assert answers[0] == answers[1]
    assert len(told) > 9


def score_prompts(model, prompts):
    """The log-probabilities of all but the first token of each prompt."""
    found = []
    for ids in prompts:
        scores = torch.log_softmax(model(torch.tensor([ids])).detach(), -1)[0]
        found += scores[range(len(ids) - 1), ids[1:]].tolist()
    return found


def bad_input_is_refused():
    mesh = mesh_of()
    with pytest.raises(ConfigError, match="kv_heads must be a multiple of the 2 processes, got 1"):
        distributed.tensor_parallel(llama(kv_heads=1), mesh)
    with pytest.raises(ConfigError, match="vocab_size must be a multiple of the 2 processes, got 97"):
        distributed.tensor_parallel(llama(vocab_size=97), mesh)
    with pytest.raises(UnsupportedCase, match="got GPT"):
        distributed.tensor_parallel(acl.nn.GPT(GPT), mesh)
    model = llama()
    model.blocks[1].mlp.down = layers.Linear(48, 32)
    with pytest.raises(UnsupportedCase, match=r"blocks.1.mlp.down is Linear\(48, 32, bias=True\)"):
        distributed.tensor_parallel(model, mesh)
    assert type(model.blocks[0].attention.qkv) is layers.Linear  # nothing was split
    with pytest.raises(ConfigError, match=r"precision must be .*, got torch.int8"):
        distributed.shard(llama(), mesh, precision=torch.int8)
    with pytest.raises(UnsupportedCase, match="Linear has none"):
        distributed.shard(nn.Linear(2, 2), mesh)
    model = distributed.shard(llama(), mesh)
    with pytest.raises(UnsupportedCase, match="sharded already"):
        distributed.shard(model, mesh)


# --- sharded ---------------------------------------------------------------------------------------------------------
def held(model, optimizer=None):
    """Bytes of parameters, gradients and state that this process holds."""
    tensors = list(model.parameters())
    tensors += [parameter.grad for parameter in tensors if parameter.grad is not None]
    if optimizer is not None:
        tensors += [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def mean_over(mesh, value):
    total = value.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total / mesh.size()


def sharded_models_train_as_one_process():
    """Five steps on half the examples each: the losses of one process, a clipped norm, and half of the memory."""
    mesh, size = mesh_of(), dist.get_world_size()
    for make in (llama, lambda: acl.nn.GPT(GPT)):
        for fused, dtype in ((set(), torch.float64), ({"cpu"}, torch.float32)):
            layers.FUSED = fused
            torch.manual_seed(2)
            one = make().to(dtype)
            model = distributed.shard(copy.deepcopy(one), mesh, reshard_after_forward=bool(fused))
            optimizers = [AdamW(each.parameters(), weight_decay=0.1) for each in (model, one)]
            steps = [
                TrainStep(each, optimizer, lambda *batch, each=each: each.loss(*batch), max_grad_norm=0.5)
                for each, optimizer in zip((model, one), optimizers, strict=True)
            ]
            for number in range(5):
                batch = tokens(rows=2 * size, seed=number)
                mine = tuple(x.chunk(size)[dist.get_rank()] for x in batch)
                ours, theirs = steps[0]([mine], 1e-2), steps[1]([batch], 1e-2)
                torch.testing.assert_close(mean_over(mesh, ours.loss), theirs.loss, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(ours.grad_norm, theirs.grad_norm, rtol=1e-5, atol=1e-6)
            if dtype == torch.float64:
                same_weights(model, one)
            assert held(model, optimizers[0]) <= held(one, optimizers[1]) / size * 1.1
    layers.FUSED = {"cuda"}


def other_optimizers_clip_by_the_norm_of_all():
    """SGD of ours, AdamW of torch, and clip_grad_norm_ alone."""
    mesh = mesh_of()
    idx, targets = tokens()
    for optimizer in (SGD, torch.optim.AdamW):
        one = llama()
        model = distributed.shard(copy.deepcopy(one), mesh)
        for each in (model, one):
            step = TrainStep(each, optimizer(each.parameters()), each.loss, max_grad_norm=0.1)
            norm = step([(idx, targets)], 1e-2).grad_norm
        same_weights(model, one)
    for each in (model, one):
        each.loss(idx, targets).backward()
        found = clip_grad_norm_(each.parameters(), 0.1)
        assert not isinstance(found, DTensor)
        again = clip_grad_norm_(each.parameters(), 1.0)
        assert abs(float(again) - 0.1) < 1e-6
    assert norm.ndim == 0


def sharded_models_compute_in_low_precision():
    """Parameters stay in float32, the loss is in float32, and a step keeps no copies of gathered weights."""
    mesh = mesh_of()
    idx, targets = tokens()
    for make in (lambda: llama(torch.float32), lambda: acl.nn.GPT(GPT)):
        for fused in (set(), {"cpu"}):
            layers.FUSED = fused
            for precision in (None, torch.bfloat16) if fused else (torch.bfloat16,):
                torch.manual_seed(3)
                one = make()
                model = distributed.shard(copy.deepcopy(one), mesh, precision=precision)
                results = []
                for each in (model, one):
                    run = TrainStep(
                        each, AdamW(each.parameters()), lambda *batch, each=each: each.loss(*batch),
                        max_grad_norm=1.0, precision=torch.bfloat16,
                    )  # fmt: skip
                    results.append([run([(idx, targets)], 1e-2) for _ in range(3)])
                for ours, theirs in zip(*results, strict=True):
                    torch.testing.assert_close(ours.loss, theirs.loss, rtol=5e-3, atol=5e-3)
                assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    layers.FUSED = {"cuda"}


def sharded_models_generate_and_evaluate():
    one = llama()
    model = distributed.shard(copy.deepcopy(one), mesh_of())
    idx, targets = tokens(length=5)
    assert torch.equal(model.generate(idx, 6, temperature=0), one.generate(idx, 6, temperature=0))
    torch.testing.assert_close(model(idx), one(idx), **NEAR)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(idx, targets), one.loss(idx, targets))


def split_sequences_of_a_sharded_model():
    """Context parallel and sharded over the same processes: FSDP2 averages the gradients."""
    mesh = mesh_of()
    one = llama()
    model = distributed.shard(distributed.context_parallel(copy.deepcopy(one), mesh), mesh)
    idx, targets = tokens()
    results = []
    for each in (model, one):
        step = TrainStep(each, AdamW(each.parameters()), each.loss, max_grad_norm=0.5)
        results.append([step([(idx, targets)], 1e-2) for _ in range(2)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    same_weights(model, one)


def fit_trains_sharded_models():
    """The losses of data parallel training with whole parameters."""
    idx, targets = tokens(rows=8)
    config = acl.nn.train.TrainConfig(steps=3, batch_size=4, device="cpu")
    models = llama(torch.float32), distributed.shard(llama(torch.float32), mesh_of())
    records = [acl.nn.train.fit(model, idx, targets, config=config).records for model in models]
    whole, sharded = ([(each.loss, each.grad_norm) for each in one] for one in records)
    assert len(whole) == 3
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(whole), rtol=1e-5, atol=1e-6)


# --- both ------------------------------------------------------------------------------------------------------------
def two_dimensions_of_a_mesh():
    """Layers split over two processes, parameters sharded over the other two."""
    mesh = mesh_of("data", "tensor")
    one = llama()
    model = distributed.tensor_parallel(copy.deepcopy(one), mesh["tensor"])
    with pytest.raises(UnsupportedCase, match="split over 2 of 4 processes, and nothing sums gradients"):
        TrainStep(model, AdamW(model.parameters()), model.loss)
    distributed.shard(model, mesh["data"])
    optimizers = [AdamW(each.parameters()) for each in (model, one)]
    steps = [
        TrainStep(each, optimizer, each.loss, max_grad_norm=0.5)
        for each, optimizer in zip((model, one), optimizers, strict=True)
    ]
    for number in range(3):
        batch = tokens(rows=4, seed=number)
        mine = tuple(x.chunk(2)[mesh.get_local_rank("data")] for x in batch)
        ours, theirs = steps[0]([mine], 1e-2), steps[1]([batch], 1e-2)
        torch.testing.assert_close(mean_over(mesh["data"], ours.loss), theirs.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.grad_norm, theirs.grad_norm, rtol=1e-5, atol=1e-6)
    same_weights(model, one)
    assert (
        held(model, optimizers[0]) < held(one, optimizers[1]) / 4 * 1.2
    )  # norms are split over the data dimension alone


CHECKS = [
    cross_entropy_of_a_split_vocabulary, split_llama_trains_as_one_process, split_llama_generates_and_saves,
    split_kin_of_llama_compute_as_one_process, split_integers_compute_as_one_process, split_engine_is_followed,
    bad_input_is_refused, sharded_models_train_as_one_process, other_optimizers_clip_by_the_norm_of_all,
    sharded_models_compute_in_low_precision, sharded_models_generate_and_evaluate, split_sequences_of_a_sharded_model,
    fit_trains_sharded_models,
]  # fmt: skip
"""For two processes."""

OF_FOUR = [two_dimensions_of_a_mesh]
