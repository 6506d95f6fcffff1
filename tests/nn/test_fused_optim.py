"""accelerant.nn.optim against torch.optim, by our kernels in the interpreter and by torch's own updates."""

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn.optim import SGD, Adam, AdamW, clip_grad_norm_
from accelerant.ops import multi_tensor as launch
from accelerant.runtime.dispatch import operations
from accelerant.runtime.ledger import ledger
from refusals import assert_raises

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encount:RuntimeWarning")  # NumPy's
OPERATIONS = ("adamw_step", "sgd_step", "global_norm", "clip_step")


@pytest.fixture(params=["triton", "torch"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("a GPU is here: CPU tensors do not reach the kernels")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for name in launch.PLANS:
            monkeypatch.setitem(launch.PLANS, name, launch.ChunkTile(64, 32, 4))
        monkeypatch.setitem(launch.SMALL, "BLOCK_T", 16)
        monkeypatch.setitem(launch.SMALL, "BLOCK_P", 16)
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in OPERATIONS:
        operations()[name].forget()
    ledger().reset()
    yield request.param
    for name in OPERATIONS:
        operations()[name].forget()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 11), nn.LayerNorm(11), nn.Linear(11, 7, bias=False), nn.Linear(7, 3))


def groups_of(model, **other):
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2, **other}]


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 9, generator=generator)
    model(x).square().mean().backward()


def train(model, optimizer, steps=3, first=0, scheduler=None):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def same(model, other, **tolerance):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


PAIRS = {
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "adamw maximize": (AdamW, torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "adam": (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam maximize": (Adam, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "adam decoupled": (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "nesterov": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}
EACH = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def op_of(ours):
    return "sgd_step" if ours is SGD else "adamw_step"


@pytest.mark.sample(3)
@EACH
def test_is_torchs(pair, implementation):
    ours, torchs, options = pair
    one, two = net(), net()
    train(one, ours(groups_of(one), **options))
    train(two, torchs(groups_of(two), **options))
    same(one, two)
    assert {(row["op"], row["implementation"]) for row in ledger().to_dict()["ops"]} == {(op_of(ours), implementation)}


def test_one_launch_for_all_groups(implementation):
    model = net()
    optimizer = AdamW(groups_of(model, betas=(0.5, 0.6)))
    train(model, optimizer, 1)
    assert [row["calls"] for row in ledger().to_dict()["ops"]] == [1]


@pytest.mark.sample(7, 3)
@EACH
@pytest.mark.parametrize("fused", [False, True])
def test_state_goes_to_torch_and_back(pair, fused):
    ours, torchs, options = pair
    one, two = net(), net()
    first, second = ours(groups_of(one), **options), torchs(groups_of(two), **options, fused=fused)
    train(one, first)
    train(two, second)
    swapped_one, swapped_two = ours(groups_of(one), lr=7.0), torchs(groups_of(two), lr=7.0)
    swapped_one.load_state_dict(copy.deepcopy(second.state_dict()))
    swapped_two.load_state_dict(copy.deepcopy(first.state_dict()))
    for mine, theirs in zip(swapped_one.param_groups, swapped_two.param_groups, strict=True):
        assert mine["lr"] == theirs["lr"] != 7.0
    train(one, swapped_one, first=3)
    train(two, swapped_two, first=3)
    same(one, two)
    for mine, theirs in zip(swapped_one.state.values(), swapped_two.state.values(), strict=True):
        assert set(mine) == set(theirs)
        assert {name: value.dtype for name, value in mine.items()} == {
            name: value.dtype for name, value in theirs.items()
        }
    if ours is AdamW:
        assert all(state["step"] == 6 for state in swapped_one.state.values())


def test_state_keeps_its_dtype_through_a_round_trip():
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.3)
    first = AdamW([parameter], master_weights=True)
    first.step()
    second = AdamW([parameter], master_weights=True)
    second.load_state_dict(first.state_dict())
    for name in ("exp_avg", "exp_avg_sq", "master", "step"):
        assert second.state[parameter][name].dtype == torch.float32
        assert torch.equal(second.state[parameter][name], first.state[parameter][name])
        assert second.state[parameter][name].data_ptr() != first.state[parameter][name].data_ptr()


@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_state_dtype(state_dtype):
    parameter = nn.Parameter(torch.ones(5, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 0.3)
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, state_dtype=state_dtype)
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"].dtype == (state_dtype or torch.float16)
    torch.testing.assert_close(parameter.float(), torch.full((5,), 0.97), rtol=1e-3, atol=0)


@pytest.mark.sample(3)
@EACH
def test_parameters_without_gradients(pair):
    """Some never have one, some have one now and then: counters go their own ways."""
    ours, torchs, options = pair
    one, two = net(), net()
    optimizers = ours(groups_of(one), **options), torchs(groups_of(two), **options)
    for step in range(4):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            model[1].weight.grad = None
            if step % 2:
                model[0].weight.grad = None
            optimizer.step()
    same(one, two)
    assert one[1].weight not in optimizers[0].state
    assert len(optimizers[0].state_dict()["state"]) == len(optimizers[1].state_dict()["state"])
    AdamW([nn.Parameter(torch.ones(3))]).step()


@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers(tensor):
    one, two = net(), net()
    rate = torch.tensor(1e-2) if tensor else 1e-2
    optimizers = AdamW(one.parameters(), lr=rate), torch.optim.AdamW(two.parameters(), lr=1e-2)
    for model, optimizer in zip((one, two), optimizers, strict=True):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        train(model, optimizer, 5, scheduler=schedule)
    same(one, two)
    assert float(optimizers[0].param_groups[0]["lr"]) == pytest.approx(1e-2 / 32)
    assert not tensor or optimizers[0].param_groups[0]["lr"] is rate


def test_cyclic_momentum():
    one, two = net(), net()
    optimizers = AdamW(one.parameters(), lr=1e-2), torch.optim.AdamW(two.parameters(), lr=1e-2)
    for model, optimizer in zip((one, two), optimizers, strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
        train(model, optimizer, 5, scheduler=schedule)
    same(one, two)


@pytest.mark.parametrize("kind", ["adamw", "nesterov"])
def test_max_grad_norm_is_clipping_before_the_step(kind):
    ours, torchs, options = PAIRS[kind]
    one, two = net(), net()
    optimizers = ours(groups_of(one), max_grad_norm=0.05, **options), torchs(groups_of(two), **options)
    assert optimizers[0].grad_norm is None
    for step in range(3):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
        before = one[0].weight.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(two.parameters(), 0.05)
        assert norm > 0.05
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(optimizers[0].grad_norm, norm)
        assert torch.equal(one[0].weight.grad, before)
    same(one, two)


@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9), SGD], ids=["AdamW", "momentum", "SGD"])
def test_gradients_clipped_by_parts_are_those_clipped_at_once(kind, monkeypatch, implementation):
    if implementation == "triton":
        pytest.skip("the kernels clip as they read")
    found = []
    for limit in (1, 7, 20, 10**6):
        monkeypatch.setattr(launch, "_SCALED_AT_ONCE", limit)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (), (8,), (4, 5), (0,), (2, 2))]
        params.append(nn.Parameter(torch.randn(5, 6).t()))  # dense, and not contiguous
        optimizer = kind(params, lr=0.1, max_grad_norm=0.05)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            kept = [param.grad.clone() for param in params]
            optimizer.step()
            assert all(torch.equal(param.grad, grad) for param, grad in zip(params, kept, strict=True))
        found.append([param.detach() for param in params])
        if kind is AdamW:
            assert all(state["step"] == 3 for state in optimizer.state.values())
    for other in found[:-1]:
        for one, same in zip(other, found[-1], strict=True):
            torch.testing.assert_close(one, same, rtol=0, atol=1e-7)  # vectors begin elsewhere


def test_torchs_update_on_a_cpu_keeps_one_table_for_gradients_in_new_memory(implementation):
    if implementation == "triton":
        pytest.skip("the kernels read addresses")
    params = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(4))]
    optimizer = AdamW(params, lr=0.1)
    held = []
    for _ in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
            held.append(param.grad)
        optimizer.step()
    (workspace,) = optimizer._workspaces.values()
    assert len(workspace._tables) == 1


@pytest.mark.parametrize("max_norm", [0.01, 1e3])
def test_clip_grad_norm(max_norm):
    one, two = net(), net()
    backward(one, 0)
    backward(two, 0)
    one[1].weight.grad = two[1].weight.grad = None
    norm = clip_grad_norm_(one.parameters(), max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(two.parameters(), max_norm))
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_clip_grad_norm_of_one_and_of_none():
    parameter = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([parameter], 1.0) == 0
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(parameter, 1) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    parameter.grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert parameter.grad[1] == pytest.approx(0.8)
    assert clip_grad_norm_(parameter, 1.0).isnan()
    assert parameter.grad.isnan().all()


def test_gradients_that_move():
    """More places than there are tables for."""
    parameter, other = (nn.Parameter(torch.ones(100)) for _ in range(2))
    ours, torchs = AdamW([parameter]), torch.optim.AdamW([other])
    held = []
    for step in range(20):
        parameter.grad = torch.full((100,), 1.0 + step)
        other.grad = parameter.grad.clone()
        held.append(parameter.grad)
        ours.step()
        torchs.step()
    torch.testing.assert_close(parameter, other)


def test_parameters_and_state_that_move():
    parameter, other = (nn.Parameter(torch.ones(100)) for _ in range(2))
    ours, torchs = AdamW([parameter]), torch.optim.AdamW([other])
    parameter.grad, other.grad = torch.ones(100), torch.ones(100)
    for _ in range(3):
        ours.step()
        torchs.step()
        parameter.data = parameter.data.clone()
        ours.state[parameter]["exp_avg"] = ours.state[parameter]["exp_avg"].clone()
    torch.testing.assert_close(parameter, other)


def test_autograd_sees_the_change():
    """A parameter that a backward pass still needs may not change unseen."""
    parameter = nn.Parameter(torch.ones(3))
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    SGD([parameter], lr=0.1).step()
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


def test_closure():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        backward(model, 0)
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7


def test_gradient_scaler():
    one, two = net(), net()
    ours, torchs = AdamW(one.parameters()), torch.optim.AdamW(two.parameters(), fused=True)
    for model, optimizer in ((one, ours), (two, torchs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(5, 9, generator=generator) * (float("inf") if step == 2 else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    same(one, two)
    assert all(state["step"] == 3 for state in ours.state.values())


@pytest.mark.sample(3)
@EACH
def test_copies_and_pickles(pair):
    ours, _, options = pair
    model = net()
    optimizer = ours(groups_of(model), **options)
    train(model, optimizer, 2)
    twin_model, twin = copy.deepcopy((model, optimizer))
    other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    for each, theirs in ((model, optimizer), (twin_model, twin), (other_model, other)):
        train(each, theirs, 2, first=2)
    same(model, twin_model, rtol=0, atol=0)
    same(model, other_model, rtol=0, atol=0)


def test_added_group():
    one, two = net(), net()
    optimizers = AdamW(one[0].parameters()), torch.optim.AdamW(two[0].parameters())
    for model, optimizer in zip((one, two), optimizers, strict=True):
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.1})
        train(model, optimizer, 2)
    same(one, two)


@EACH
@pytest.mark.parametrize("fake", [False, True])
def test_meta_and_fake_parameters(pair, fake):
    """For predictions of memory: the state has the shapes of a real step's."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    ours, torchs, options = pair

    def state(kind, device, **more):
        parameter = nn.Parameter(torch.zeros(4, 5, device=device))
        parameter.grad = torch.ones_like(parameter)
        optimizer = kind([parameter], **options, **more)
        optimizer.step()
        return {name: x for name, x in optimizer.state[parameter].items() if isinstance(x, torch.Tensor) and x.dim()}

    with FakeTensorMode() if fake else contextlib.nullcontext():
        found = state(ours, "cpu" if fake else "meta", max_grad_norm=1.0)
    wanted = state(torchs, "cpu")
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in wanted.items()}
    assert all(isinstance(x, FakeTensor) if fake else x.is_meta for x in found.values())


def test_tensor_subclass():
    class Named(torch.Tensor):
        pass

    one, two = nn.Parameter(torch.ones(5).as_subclass(Named)), nn.Parameter(torch.ones(5))
    for parameter, kind in ((one, AdamW), (two, torch.optim.AdamW)):
        parameter.grad = torch.full_like(parameter, 0.5)
        kind([parameter]).step()
    torch.testing.assert_close(one.detach().as_subclass(torch.Tensor), two.detach())


def test_strided_parameter(implementation):
    one, two = (nn.Parameter(torch.ones(6, 8)[:, ::2]) for _ in range(2))
    for parameter, kind in ((one, AdamW), (two, torch.optim.AdamW)):
        parameter.grad = torch.arange(48.0).view(6, 8)[:, ::2]
        kind([parameter], lr=0.1).step()
    torch.testing.assert_close(one, two)


# --- rejections ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("options", "match"), [
    ({"lr": -1.0}, "lr must be a number, at least 0; got -1.0"),
    ({"lr": float("nan")}, "lr must be a number"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a number, at least 0 and below 1; got 1.0"),
    ({"eps": -1e-8}, "eps must be"),
    ({"weight_decay": -0.1}, "weight_decay must be"),
    ({"max_grad_norm": -1.0}, "max_grad_norm must be"),
])  # fmt: skip
def test_adamw_rejects(options, match):
    assert_raises(ConfigError, match, lambda: AdamW([nn.Parameter(torch.ones(3))], **options))


def test_sgd_rejects():
    parameter = nn.Parameter(torch.ones(3))
    assert_raises(ConfigError, r"momentum must be a number, at least 0; got -0.9", SGD, [parameter], momentum=-0.9)
    with pytest.raises(ConfigError, match=r"nesterov needs a momentum above 0 and no dampening; got 0.9 and 0.1"):
        SGD([parameter], momentum=0.9, dampening=0.1, nesterov=True)


def test_rejects_what_does_not_fit():
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedDtype, match="parameter 0 is complex64"):
        AdamW([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    assert_raises(ShapeError, "lr must have one element", AdamW, [parameter], lr=torch.ones(2))
    optimizer = AdamW([parameter], lr=torch.ones((), dtype=torch.float64))
    parameter.grad = torch.ones(3)
    assert_raises(ConfigError, "lr as a tensor must be float32 on cpu or on the CPU; got float64", optimizer.step)
    parameter.grad = torch.ones(3).to_sparse()
    assert_raises(ConfigError, r"gradient 0 is torch.sparse_coo", lambda: AdamW([parameter]).step())
    assert_raises(ConfigError, "max_norm must be a number, at least 0; got -1", clip_grad_norm_, parameter, -1)
    torchs = torch.optim.AdamW([parameter], amsgrad=True)
    with pytest.raises(ConfigError, match="amsgrad=True is not supported"):
        AdamW([parameter]).load_state_dict(torchs.state_dict())


def follow(ours, theirs, changes):
    """Steps of two optimizers side by side, a change before each; the parameters stay the same."""
    for step, change in enumerate(changes):
        for optimizer in (ours, theirs):
            change(optimizer)
            for i, param in enumerate(optimizer.param_groups[0]["params"]):
                param.grad = torch.full_like(param, 0.5 + step + i)
            optimizer.step()
        for one, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(one, other)


def leaves():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n)) for n in (5, 300)]


def test_momentum_raised_after_the_first_step():
    raised = [lambda o: None, lambda o: o.param_groups[0].update(momentum=0.9), lambda o: None, lambda o: None]
    follow(SGD(leaves(), lr=0.1), torch.optim.SGD(leaves(), lr=0.1), raised)


def test_a_parameter_put_in_another_ones_place_is_updated():
    def exchange(optimizer):
        torch.manual_seed(1)
        optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.randn(7))

    follow(AdamW(leaves(), lr=0.1), torch.optim.AdamW(leaves(), lr=0.1), [lambda o: None, exchange, lambda o: None])


@pytest.mark.parametrize(
    ("ours", "theirs", "options"), [(AdamW, torch.optim.AdamW, {}), (SGD, torch.optim.SGD, {"momentum": 0.9})]
)
def test_a_state_put_in_another_ones_place_is_used(ours, theirs, options):
    def forget(optimizer):
        optimizer.state[optimizer.param_groups[0]["params"][1]] = {}

    nothing = [lambda o: None] * 2
    follow(ours(leaves(), lr=0.1, **options), theirs(leaves(), lr=0.1, **options), [*nothing, forget, *nothing])
