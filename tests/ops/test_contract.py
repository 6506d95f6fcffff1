"""Every op folder, walked: what it must hold, and what each op must pass."""

import ast
import importlib.util
import inspect
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from compile_kernels import AMD_TARGETS
from op_checks import (
    ADDED,
    DIFFERENTIABLE,
    DTYPES,
    FOLDER,
    FOLDER_OF,
    FOLDERS,
    OPS,
    Calls,
    bound,
    cases_of,
    check_beside,
    check_sample,
    counted,
    differentiable,
    each_sample,
    parts,
    path_of,
    ran,
    results,
    small_samples,
    wants_gradient,
)
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import accelerant
import accelerant.ops
from accelerant.bench import subjects
from accelerant.ops.registry import public_op, public_ops
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.dispatch import force, operations

OTHER_TARGETS = [target for target in CUDA_TARGETS[1:] if target != "sm_90"]
"""Targets for which one specialization of each kernel is compiled: the oldest and another vendor's in the slow tests,
the rest under `make soak`, as is every specialization for sm_90, which the tests on a GPU compile too."""

SOAK = [pytest.mark.slow, pytest.mark.soak]


def public_kernels(folder):
    """The Triton functions of a folder that are launched: those without an underscore."""
    path = path_of(folder) / "triton_kernels.py"
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


WITH_KERNELS = [op for op in OPS if public_kernels(FOLDER_OF[op])]
"""Ops of folders with kernels of ours."""


def test_every_op_is_public():
    assert sorted([*accelerant.ops.__all__, ADDED]) == OPS == list(public_ops())


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_complete(folder):
    for name in ("__init__.py", "cases.py"):
        assert (path_of(folder) / name).is_file(), f"{folder} has no {name}"
    if folder == ADDED:
        assert len(list(path_of(folder).glob("*.*"))) <= 3
        return
    assert (Path(__file__).parent / f"test_{folder}.py").is_file(), f"{folder} has no test module"


@pytest.mark.parametrize("op", OPS)
def test_cases_are_complete(op):
    it = parts(op)
    assert it.cases.SAMPLES
    assert it.cases.LARGE
    assert it.cases.BENCHMARKS
    assert set(it.cases.TOLERANCES) == set(DTYPES)
    shapes = [torch.Size(sample.shapes[0]) for sample in it.cases.SAMPLES]
    assert any(shape.numel() == 0 for shape in shapes), f"{op} has no empty sample"
    smallest = getattr(it.cases, "SMALLEST", 1)
    assert any(shape.numel() == smallest for shape in shapes), f"{op} has no sample of {smallest} element(s)"
    for word in ("Args:", "Returns:", "Raises:"):
        assert word in it.call.__doc__, f"the docstring of {op} lacks {word}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kernel_has_a_compilation(folder):
    listed = {compilation.kernel.name for compilation in cases_of(folder).KERNELS}
    assert listed == public_kernels(folder)
    ops = tuple(f"{op}_" for op, home in FOLDER_OF.items() if home == folder)
    assert all(name.startswith((*ops, f"{folder}_")) for name in listed)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if public_kernels(folder)])
def test_kernel_module_says_what_it_does(folder):
    header = ast.get_docstring(ast.parse((path_of(folder) / "triton_kernels.py").read_text()))
    for word in ("Source:", "Layout:", "Grid:", "Bound:"):
        assert word in header, f"the header of {folder}'s kernels lacks {word}"


def test_every_op_has_a_row_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "ops.md").read_text(encoding="utf-8")
    names = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `")))
    assert sorted([*names, ADDED]) == OPS


def test_what_a_declaration_gives():
    """The row of the documentation and the benchmark's subject come from the op's own folder."""
    row = "| `leaky_relu` | Scale negative elements by a slope | Triton | torch |"
    assert public_op(ADDED).row == row
    subject = subjects.subject_of(ADDED)
    x = torch.randn(3, 5)
    assert torch.equal(subject.theirs(x), public_op(ADDED).function(x))
    assert set(subjects.OPS) == {*accelerant.ops.__all__, ADDED}


def taken(run):
    """The fewest and the most positional arguments of a function; any number of a builtin that does not say it."""
    try:
        parameters = inspect.signature(run).parameters.values()
    except ValueError:
        return 0, math.inf
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    most = math.inf if any(each.kind is each.VAR_POSITIONAL for each in parameters) else len(places)
    return sum(each.default is each.empty for each in places), most


def test_implementations_of_an_operation_take_equally_many_arguments():
    """Those for a GPU, too, which no test on a CPU calls."""
    package = Path(accelerant.__file__).parent
    for path in package.rglob("*.py"):
        if re.search(r"\bOperation\(", path.read_text(encoding="utf-8")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            importlib.import_module(name.removesuffix(".__init__"))
    found = {
        name: {each.name: taken(run) for each in operation.implementations for run in (each.run, each.bind) if run}
        for name, operation in operations().items()
    }
    assert {"attention_fwd", "clip_form", "decode_linear", "gelu_fwd"} <= found.keys()
    counts = {name: (max(low for low, _ in each.values()), min(most for _, most in each.values()))
              for name, each in found.items()}  # fmt: skip
    assert not {name: found[name] for name, (low, most) in counts.items() if low > most}


# --- right results ---------------------------------------------------------------------------------------------------
WHOLE = 2
"""So many samples of an op meet every dtype; the later ones take turns, which costs a third of the time. On a GPU each
sample meets each dtype (test_gpu.py)."""


def each_implementation():
    """(op, sample, dtype, implementation), float64 and ops without kernels by torch alone."""
    seen = Counter()
    for param in each_sample():
        op, sample = param.values
        place, seen[op] = seen[op], seen[op] + 1
        low = DTYPES[1:] if place < WHOLE else (DTYPES[1 + place % 3],)
        pairs = [(dtype, "triton") for dtype in low if op in WITH_KERNELS]
        pairs += [(dtype, "torch") for dtype in (DTYPES if place < WHOLE else (DTYPES[place % 4],))]
        for dtype, implementation in pairs:
            name = f"{param.id}-{str(dtype).removeprefix('torch.')}-{implementation}"
            yield pytest.param(op, sample, dtype, implementation, id=name)


@pytest.mark.sample(13, 12)
@pytest.mark.parametrize(("op", "sample", "dtype", "implementation"), list(each_implementation()))
def test_matches_the_reference(op, sample, dtype, implementation, request):
    """Each that dispatch may choose: our kernels, and what a CPU without Triton's interpreter runs."""
    request.getfixturevalue("interpreted" if implementation == "triton" else "uninterpreted")
    it = parts(op)
    own = implementation == "triton"
    tolerances = it.cases.TOLERANCES if own else getattr(it.cases, "TORCH_TOLERANCES", None) or it.cases.TOLERANCES
    check_sample(op, sample, dtype, tolerances=tolerances)
    left = own or (dtype == torch.float64 and "torch" in it.runs)  # float64 is left to torch by kernels of a CPU, too
    wanted = implementation if left else getattr(it.cases, "ON_CPU", "torch")
    assert {wanted} <= ran() <= {wanted} | it.runs


@pytest.mark.parametrize("op", WITH_KERNELS)
def test_own_kernels_run_forward_and_backward(op, interpreted):
    it = parts(op)
    sample = next(sample for sample in it.cases.SAMPLES if torch.Size(sample.shapes[0]).numel() > 1)
    check_sample(op, sample, torch.float32)
    found = {row["op"]: row["implementation"] for row in counted()}
    wanted = {f"{op}_fwd": "triton", f"{op}_bwd": "triton"} if op in DIFFERENTIABLE else {f"{op}_fwd": "triton"}
    assert found.items() >= wanted.items()
    assert set(found.values()) <= {"triton"} | it.runs


@pytest.mark.sample(5)
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_implementations_agree(op, interpreted):
    """What dispatch may fall back to gives the same as what it prefers."""
    it = parts(op)
    sample = it.cases.SAMPLES[2]
    (forward,) = (each for name, each in operations().items() if name == f"{op}_fwd")
    with Calls() as calls, torch.no_grad():
        it.call(*sample.tensors(torch.float32), **sample.options)
    _, args = calls.seen[0]
    found = [
        forward.run(each.name, *args) for each in forward.implementations if each.name in ("triton", "llvm", "torch")
    ]
    assert len(found) > 1
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


# --- torch's own checks ----------------------------------------------------------------------------------------------
def middling(op):
    """A sample of a few elements in more than one dimension."""
    return next(
        each for each in parts(op).cases.SAMPLES if len(each.shapes[0]) > 1 and torch.Size(each.shapes[0]).numel() > 1
    )


def fresh(arg):
    return arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg


@pytest.mark.sample(11, 3)
@pytest.mark.parametrize(("op", "sample"), small_samples(limit=40))
def test_gradcheck(op, sample):
    it = bound(op, sample, torch.float64)
    tensors = [tensor.requires_grad_() for tensor in it.tensors]
    with force(
        dropout_native_fwd="torch"
    ):  # whatever is forced, no call is left to torch's autograd (test_cpu_fast_path.py)
        assert torch.autograd.gradcheck(it.call, tensors)
        assert torch.autograd.gradgradcheck(it.call, tensors)


def registered_calls(op, sample):
    """What a forward and a backward pass call of torch's registry, with the arguments."""
    it = parts(op)
    with Calls() as calls:
        ys = results(it.call(*differentiable(sample, torch.float32), **sample.options))
        sum(y.sum() for y in ys if y.requires_grad).backward()
    names = {func.name().removeprefix("accelerant::") for func, _ in calls.seen}
    assert names
    assert all(name == op or name.startswith(f"{op}_") or name in it.runs for name in names)
    return calls.seen


def opcheck(op, sample, checks):
    for func, args in registered_calls(op, sample):
        result = torch.library.opcheck(func, tuple(fresh(arg) for arg in args), test_utils=checks)
        assert result == dict.fromkeys(checks, "SUCCESS"), (func, result)


TRACED = "test_aot_dispatch_dynamic"
"""The check of opcheck that takes nine tenths of its time: it traces the op for symbolic sizes."""

OPCHECKED = small_samples(limit=100)


def marked(first, others):
    """The samples with marks: first for a middling one of each op and its first empty one, others for the rest."""
    chosen = set()
    for op in DIFFERENTIABLE:
        own = [param for param in OPCHECKED if param.values[0] == op]
        empty = [
            param for param in own if any(torch.Size(shape or (1,)).numel() == 0 for shape in param.values[1].shapes)
        ]
        usual = [param for param in own if param.values[1].name == middling(op).name]
        chosen |= {param.id for param in (*usual, *empty[:1])}
    marks = (first if param.id in chosen else others for param in OPCHECKED)
    return [pytest.param(*param.values, id=param.id, marks=each) for param, each in zip(OPCHECKED, marks, strict=True)]


@pytest.mark.sample(7, 2)
@pytest.mark.parametrize(("op", "sample"), marked((), pytest.mark.slow))
def test_opcheck(op, sample):
    opcheck(op, sample, ("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.sample(13)
@pytest.mark.parametrize(("op", "sample"), marked(pytest.mark.slow, SOAK))
def test_opcheck_traces_for_any_size(op, sample):
    opcheck(op, sample, (TRACED,))


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_second_derivative_in_low_precision(op):
    """create_graph=True takes another backward pass; the ledger says so, and the numbers are the reference's."""
    sample = middling(op)
    found = []
    for which, dtype in (("call", torch.float32), ("reference", torch.float64)):
        it = bound(op, sample, torch.float32)
        tensors = [each.to(dtype).requires_grad_() for each in it.tensors]
        y = getattr(it, which)(*tensors)
        (dx,) = torch.autograd.grad(y.square().sum(), tensors[0], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), tensors[0])[0].double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    first = counted(f"{op}_bwd")
    assert op not in WITH_KERNELS or all(row["refused"] or row["implementation"] == "triton" for row in first)


@pytest.mark.sample(11, 2)  # test_fake_tensors_pass_through has every op
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_compiles_to_one_graph(op, dynamic):
    it = bound(op, middling(op), torch.float32)
    torch._dynamo.reset()
    check_beside(it.call, torch.compile(it.call, fullgraph=True, dynamic=dynamic, backend="aot_eager"), *it.tensors)


KEEP = ["relu", "sigmoid", "tanh", "silu", "gelu", "softmax", "log_softmax", "swiglu", "dropout"]
KEEP += ["max_pool2d", "avg_pool2d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", KEEP)
def test_keeps_its_dtype_under_autocast(op, dtype):
    sample = middling(op)
    with torch.autocast("cpu", torch.bfloat16):
        assert parts(op).call(*sample.tensors(dtype), **sample.options).dtype == dtype


@pytest.mark.sample(7)
@pytest.mark.parametrize("op", OPS)
def test_no_graph_without_gradient(op):
    it = parts(op)
    sample = it.cases.SAMPLES[1]
    tensors = differentiable(sample, torch.float32) if op in DIFFERENTIABLE else sample.tensors(torch.float32)
    with torch.no_grad():
        assert all(y.grad_fn is None for y in results(it.call(*tensors, **sample.options)))
    assert not any(y.requires_grad for y in results(it.call(*sample.tensors(torch.float32), **sample.options)))
    with torch.inference_mode():
        assert all(y.is_inference() for y in results(it.call(*sample.tensors(torch.float32), **sample.options)))


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors_pass_through(op):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    it = parts(op)
    sample = it.cases.SAMPLES[1]
    reals = results(it.call(*sample.tensors(torch.float32), **sample.options))
    with FakeTensorMode() as mode:
        fakes = [None if tensor is None else mode.from_tensor(tensor) for tensor in sample.tensors(torch.float32)]
        found = results(it.call(*fakes, **sample.options))
    for fake, real in zip(found, reals, strict=True):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors_pass_through(op):
    it = parts(op)
    sample = middling(op)
    reals = results(it.call(*sample.tensors(torch.float32), **sample.options))
    metas = [None if each is None else each.to("meta") for each in sample.tensors(torch.float32)]
    if op in DIFFERENTIABLE:
        metas = [each.requires_grad_() if wants_gradient(each) else each for each in metas]
    found = results(it.call(*metas, **sample.options))
    for meta, real in zip(found, reals, strict=True):
        assert (meta.device.type, meta.shape, meta.stride(), meta.dtype) == (
            "meta", real.shape, real.stride(), real.dtype
        )  # fmt: skip
    if op in DIFFERENTIABLE:
        sum(meta.sum() for meta in found if meta.requires_grad).backward()
        assert all(not wants_gradient(each) or each.grad.shape == each.shape for each in metas)


# --- forward mode, and the transforms of torch.func ------------------------------------------------------------------
def transformed_parts(op, way):
    """A sample's tensors, the op by its public function or past it as torch knows it, and the reference."""
    sample = middling(op)
    it = bound(op, sample, torch.float32)
    if way == "public":
        return it.tensors, it.call, it.reference
    with Calls() as calls:
        it.call(*it.tensors)
    registered, args = calls.seen[0]
    shown = len(results(parts(op).call(*sample.tensors(torch.float32), **sample.options)))
    places = [next(at for at, arg in enumerate(args) if arg is tensor) for tensor in it.tensors]

    def call(*tensors):
        full = list(args)
        for at, tensor in zip(places, tensors, strict=True):
            full[at] = tensor
        ys = results(registered(*full))[:shown]
        return ys[0] if shown == 1 else torch.cat([y.flatten() for y in ys])

    return it.tensors, call, it.reference


TRANSFORMED = [pytest.param(op, way, id=f"{op}-{way}") for op in DIFFERENTIABLE for way in ("public", "registered")]


def same(actual, expected):
    """Fail unless within 1e-5 of the largest element: elements are sums that cancel, in another order on each CPU."""
    largest = max((each.abs().max().item() for each in tree_leaves(expected) if each.numel()), default=0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, largest))


def loss_of(call):
    return lambda *tensors: call(*tensors).square().sum()


@pytest.mark.sample(3, 2)  # each op in one of its ways or both
@pytest.mark.parametrize(("op", "way"), TRANSFORMED)
def test_func_grad(op, way):
    tensors, call, reference = transformed_parts(op, way)
    places = tuple(range(len(tensors)))
    same(torch.func.grad(loss_of(call), places)(*tensors), torch.func.grad(loss_of(reference), places)(*tensors))
    twice = [
        torch.func.grad(lambda *args, f=f: torch.func.grad(loss_of(f))(*args).square().sum())(*tensors)
        for f in (call, reference)
    ]
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(3, 2)  # each op in one of its ways or both
@pytest.mark.parametrize(("op", "way"), TRANSFORMED)
def test_func_jvp(op, way):
    tensors, call, reference = transformed_parts(op, way)
    tangents = tuple(torch.randn_like(each) for each in tensors)
    y, dy = torch.func.jvp(call, tuple(tensors), tangents)
    expected, expected_dy = torch.func.jvp(reference, tuple(tensors), tangents)
    same(y, expected)
    same(dy, expected_dy)


@pytest.mark.sample(3, 2)  # each op in one of its ways or both
@pytest.mark.parametrize(("op", "way"), TRANSFORMED)
def test_func_jacobians(op, way):
    tensors, call, reference = transformed_parts(op, way)
    places = tuple(range(len(tensors)))
    expected = torch.func.jacrev(reference, places)(*tensors)
    same(torch.func.jacrev(call, places)(*tensors), expected)
    same(torch.func.jacfwd(call, places)(*tensors), expected)


@pytest.mark.sample(3, 2)  # each op in one of its ways or both
@pytest.mark.parametrize(("op", "way"), TRANSFORMED)
def test_per_sample_gradients(op, way):
    """vmap(grad): a batch of the first tensor against the same others, as parameters are."""
    tensors, call, reference = transformed_parts(op, way)
    batch = tensors[0] * torch.rand(3, *tensors[0].shape)  # probabilities stay such
    in_dims = (0, *(None for _ in tensors[1:]))
    places = tuple(range(len(tensors)))
    same(torch.func.vmap(call, in_dims)(batch, *tensors[1:]), torch.func.vmap(reference, in_dims)(batch, *tensors[1:]))
    actual, expected = (
        torch.func.vmap(torch.func.grad(loss_of(f), places), in_dims)(batch, *tensors[1:]) for f in (call, reference)
    )
    same(actual, expected)


@pytest.mark.sample(7, 2)
@pytest.mark.parametrize(
    ("op", "way", "place"),
    [
        pytest.param(*param.values, place, id=f"{param.id}-{place}")
        for param in TRANSFORMED
        for place in range(len(bound(param.values[0], middling(param.values[0]), torch.float32).tensors))
    ],
)
def test_forward_mode_keeps_the_tangent(op, way, place):
    """A tangent on any argument, and one that comes to a backward pass."""
    tensors, call, reference = transformed_parts(op, way)
    tangent = torch.randn_like(tensors[place])
    found = []
    for f in (call, reference):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(each, tangent) if at == place else each for at, each in enumerate(tensors)]
            found.append(forward_ad.unpack_dual(f(*duals)).tangent)
    same(*found)
    leaves = [fresh(each.requires_grad_()) for each in tensors]
    dy = torch.randn_like(reference(*tensors))
    ddy = torch.randn_like(dy)
    found.clear()
    for f in (call, reference):
        y = f(*leaves)
        with forward_ad.dual_level():
            (gradient,) = torch.autograd.grad(y, leaves[place], forward_ad.make_dual(dy, ddy))
            found.append(forward_ad.unpack_dual(gradient).tangent)
    same(*found)


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_kernels_run_beside_tangents(op, interpreted):
    """Inside a level of forward mode, what carries no tangent runs as ever, with its gradient."""
    it = bound(op, middling(op), torch.float32)
    tensors = [tensor.requires_grad_() for tensor in it.tensors]
    with forward_ad.dual_level():
        it.call(*tensors).sum().backward()
    preferred = "triton" if op in WITH_KERNELS else "torch"
    assert {preferred} <= ran() <= {preferred} | parts(op).runs
    assert all(each.grad is not None for each in tensors)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_transform_of_something_else(op):
    """A tensor from outside the transform that wants a gradient of its own."""
    it = bound(op, middling(op), torch.float32)
    tensors, others = ([fresh(each).requires_grad_() for each in it.tensors] for _ in range(2))
    s = torch.tensor(2.0)
    slope = torch.func.grad(lambda s: (s * it.call(*tensors)).sum())(s)
    same(slope, it.reference(*others).sum())
    slope.backward()
    it.reference(*others).sum().backward()
    for one, other in zip(tensors, others, strict=True):
        same(one.grad, other.grad)


@pytest.mark.sample(5)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_batched_backward(op):
    tensors, call, reference = transformed_parts(op, "public")
    leaves = [fresh(each.requires_grad_()) for each in tensors]
    dy = torch.randn(4, *reference(*tensors).shape)
    actual, expected = (torch.autograd.grad(f(*leaves), leaves, dy, is_grads_batched=True) for f in (call, reference))
    same(actual, expected)


# --- compiling, without a GPU ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """(Folder, "every" or "first", targets) -> the report of compile_kernels.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(FOLDER.parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, environment.get("PYTHONPATH"))))
    command = [sys.executable, str(Path(__file__).parent / "compile_kernels.py")]
    log = tmp_path_factory.mktemp("compiler") / "log"
    running = []

    def stop():
        while running:
            process = running.pop()
            process.kill()
            process.communicate()

    def ask(folder, which, targets):
        if not running:
            with log.open("w") as stderr:
                running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        env=environment,
                    )
                )
        process = running[0]
        watch = threading.Timer(300, process.kill)
        watch.start()
        try:
            process.stdin.write(" ".join((folder, which, *targets)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        if not answer:
            stop()
            pytest.fail(f"no answer for {folder}: {log.read_text()[-2000:]}")
        return json.loads(answer)

    yield ask
    stop()


@pytest.mark.sample(13)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this system")
@pytest.mark.parametrize(("which", "targets"), [
    pytest.param("first", ("sm_90",), id="hopper", marks=pytest.mark.slow),
    pytest.param("first", (CUDA_TARGETS[0], "gfx942"), id="oldest-and-amd", marks=pytest.mark.slow),
    pytest.param("first", ("gfx90a", "gfx1100"), id="other-amd", marks=pytest.mark.slow),
    pytest.param("every", ("sm_90",), id="hopper-all", marks=SOAK),
    pytest.param("first", OTHER_TARGETS, id="others", marks=SOAK),
])  # fmt: skip
@pytest.mark.parametrize("op", [folder for folder in FOLDERS if public_kernels(folder)])
def test_kernels_compile(op, which, targets, compiler):
    rows = compiler(op, which, targets)
    failed = [f"{row['kernel']} for {row['target']}: {row['error']}" for row in rows if row["error"]]
    assert not failed, "\n".join(failed)
    declared = {each.kernel.name: (*each.kernel.targets, *AMD_TARGETS) for each in cases_of(op).KERNELS}
    assert {(row["kernel"].split()[0], row["target"]) for row in rows} == {
        (name, target) for name, meant in declared.items() for target in targets if target in meant
    }
    assert all(row["code_bytes"] > 0 for row in rows)
    assert all(row["threads"] == row["warps"] * (64 if row["target"].startswith("gfx9") else 32) for row in rows)
    spilled = [row for row in rows if row["stack_bytes"]]
    assert not spilled, f"registers spill: {spilled}"
    apart = getattr(cases_of(op), "ELEMENT_LOADS", ())  # what no kernel could read 16 bytes at a time
    narrow = [row for row in rows if row["wide_loads"] == 0 and not any(words in row["kernel"] for words in apart)]
    assert not narrow, f"no 16-byte loads: {narrow}"
