"""Private steps on a GPU: the update of microbatches of one, bfloat16, noise of the right size."""

import copy
import threading

import pytest
import torch
from loops import clipped_sums, mlp, parameters, points, private, tiny_gpt
from test_train_private import MICRO, Watcher, settings
from torch.nn import functional as F

from accelerant.nn.optim import SGD, AdamW
from accelerant.nn.train.job import run_training
from accelerant.privacy import dp
from accelerant.privacy.dp.training.run import PrivateRun
from accelerant.privacy.dp.training.step import PrivateStep

pytestmark = pytest.mark.gpu


def loss(model, x, y):
    return F.cross_entropy(model(x.cuda()), y.cuda())


def test_an_ordinary_loop_is_a_loop_of_microbatches_of_one():
    data, model = points(), mlp().cuda()
    plain, draws, parts = copy.deepcopy(model), [], []
    with private(model, 0.3, lr=0.3) as training:
        for batch in training.batches(data, microbatch=8, steps=3):
            loss(model, *batch.tensors).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            parts.append(tuple(each[batch.mask] for each in batch.tensors))
            if batch.last:
                draws.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
                parts = []
    for rows in draws:
        for p, total in zip(plain.parameters(), clipped_sums(plain, loss, rows, 0.5), strict=True):
            p.data -= (0.3 * total / 12).float()
    for ours, theirs in zip(parameters(model), parameters(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_private_backward_pass_runs_on_the_calling_thread_and_others_on_autograds_own():
    threads, model = [], mlp().cuda()
    other = torch.nn.Linear(2, 2).cuda()
    with private(model, 0.3, lr=0.3) as training:
        for batch in training.batches(points(), steps=1):
            value = loss(model, *batch.tensors)
            value.register_hook(lambda grad: threads.append(threading.get_ident()))
            value.backward()
            training.optimizer.step()
            assert torch._C._is_multithreading_enabled()
        loss(model, *batch.tensors)  # without a backward pass
    y = other(torch.ones(1, 2).cuda()).sum()
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    y.backward()
    assert threads[0] == threading.get_ident() != threads[1]


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.usefixtures("fixed_entropy")
def test_a_gpt_in_bfloat16_takes_noise_of_the_right_size(secure):
    model = tiny_gpt(width=32, heads=2).cuda()
    before = torch.cat([p.flatten() for p in parameters(model)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"optimizer": inner, "noise_multiplier": 3.0, "max_grad_norm": 2.0, "secure": secure}
    tokens = torch.randint(11, (12, 9)).cuda()
    with private(model, 1.0, **options) as training:
        for batch in training.batches((tokens[:, :-1], tokens[:, 1:]), steps=1):
            with torch.autocast("cuda", torch.bfloat16):
                value = model.loss(*batch.tensors)
            value.backward()
            training.optimizer.step()
    moved = (torch.cat([p.flatten() for p in parameters(model)]) - before) * 12
    assert float(moved.std()) == pytest.approx(6.0, rel=0.05)  # some 27,000 numbers; the sum adds at most 24 in norm


def test_adaptive_clipping_and_our_optimiser():
    data, model = points(), mlp().cuda()
    inner = AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
    options = {"optimizer": inner, "noise_multiplier": 1.0, "clipping": "adaptive"}
    with private(model, 0.5, **options) as training:
        for batch in training.batches(data, microbatch=8, steps=3):
            loss(model, *batch.tensors).backward()
            training.optimizer.step()
        assert training.clipper.max_grad_norm != 0.5
        assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.usefixtures("fixed_entropy")
def test_a_privatizer_on_the_device():
    make = dp.Privatizer(noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2.0)
    grads = torch.randn(5, 7, device="cuda")
    wanted = sum(g * min(1.0, 1.0 / float(g.norm())) for g in grads) / 2
    torch.testing.assert_close(make(grads), wanted)
    noisy = dp.Privatizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1.0)
    assert float(noisy(torch.zeros(1, 40000, device="cuda")).std()) == pytest.approx(1.0, rel=0.04)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.usefixtures("fixed_entropy")
def test_replays_draw_anew(secure):
    """A captured update at zero gradients: each step is noise alone, and no step repeats another."""
    model = tiny_gpt().cuda()
    inner = SGD(model.parameters(), lr=1.0)
    options = {"optimizer": inner, "noise_multiplier": 1.0, "secure": secure, "expected_batch_size": 1.0}
    tokens = torch.randint(11, (4, 9))
    training = private(model, 1.0, **options)
    step = PrivateStep(training, lambda x, y: model.loss(x, y) * 0.0)
    moved, before = [], torch.cat([p.detach().flatten() for p in model.parameters()])
    for batch in training._draws((tokens[:, :-1], tokens[:, 1:]), microbatch=4, steps=12):
        step(batch, 1.0)
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved.append(now - before)
        before = now
    assert step.captured
    for number, each in enumerate(moved):
        assert float(each.std()) == pytest.approx(0.5, rel=0.06)
        for other in moved[:number]:
            assert abs(float(torch.corrcoef(torch.stack([each, other]))[0, 1])) < 0.1
    training.close()


def test_the_main_job(tmp_path):
    pytest.importorskip("dp_accounting", reason="the job states an epsilon, for which it wants the extra privacy")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(400)))
    extension = PrivateRun(settings(tmp_path / "out"))
    run = MICRO.replaced(data=(str(text),), steps=12, batch_size=8, microbatch=4, width=32)
    device = torch.device("cuda")
    summary = run_training(run, tmp_path / "out", device, progress=Watcher(), extension=extension).summary
    assert summary["steps"] == 12
    assert sum(event.count for event in dp.PrivacyLedger.read(tmp_path / "out" / "privacy-ledger.jsonl").events) == 12
