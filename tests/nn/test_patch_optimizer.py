"""Optimizers of patched models' parameters take fused kernels before their first step, and only then."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from accelerant.nn import patch, unpatch
from accelerant.nn.patching import api


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Parameters on the CPU count as those on a GPU do: torch has fused kernels for both."""
    monkeypatch.setattr(api, "_is_plain", lambda x: x.is_floating_point())


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())


def trained(model, make, steps=3):
    used = make(model.parameters())
    for _ in range(steps):
        used.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        used.step()
    return used


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_by_fused_kernels_gives_what_the_usual_one_gives(kind):
    plain, patched = layers(), layers()
    patch(patched)
    assert trained(plain, kind).param_groups[0]["fused"] is None
    used = trained(patched, kind)
    assert used.param_groups[0]["fused"] is True
    assert all(state["step"] == 3 for state in used.state.values())
    usual = kind([nn.Parameter(x.detach().clone()) for x in patched.parameters()])
    usual.load_state_dict(copy.deepcopy(used.state_dict()))
    usual.param_groups[0]["fused"] = None
    for one, two in zip(used.param_groups[0]["params"], usual.param_groups[0]["params"], strict=True):
        two.grad = one.grad.clone()
    for each in (used, usual):
        each.step()
    for one, two in zip(used.param_groups[0]["params"], usual.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": False}, {"capturable": True, "foreach": False}]
)
def test_a_chosen_step_stays(options):
    model = layers()
    patch(model)
    used = torch.optim.AdamW(model.parameters(), **options)
    api._before_step(used, (), {})
    assert {name: used.param_groups[0][name] for name in options} == options
    assert not used.param_groups[0]["fused"]


def test_other_optimizers_parameters_and_states_stay():
    model = layers()
    used = trained(model, torch.optim.AdamW, steps=1)
    patch(model)
    used.step()  # which has a state
    assert used.param_groups[0]["fused"] is None
    assert not trained(model, lambda params: torch.optim.SGD(params, lr=0.1)).param_groups[0]["fused"]
    more = trained(model, lambda params: torch.optim.AdamW([*params, nn.Parameter(torch.ones(2))]), steps=1)
    assert more.param_groups[0]["fused"] is None
    unpatch(model)
    assert trained(model, torch.optim.AdamW).param_groups[0]["fused"] is None


def test_torch_has_our_hook_while_a_model_is_patched(monkeypatch):
    monkeypatch.setattr(api, "_with_fused_steps", weakref.WeakSet())
    api._leave_steps(nn.Linear(1, 1))
    hooks, models = _global_optimizer_pre_hooks, (layers(), layers())
    for model in models:
        patch(model)
        assert list(hooks.values()).count(api._before_step) == 1
    unpatch(models[0])
    assert api._before_step in hooks.values()
    unpatch(models[1])
    assert api._before_step not in hooks.values()
