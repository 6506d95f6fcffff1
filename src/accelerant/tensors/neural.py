"""Aten operations of neural networks on TensorDevices: products, activations, softmax, norms, attention, losses.

None of them has a kernel of its own: softmax is two reductions and an elementwise expression, attention two batched
products around it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

from accelerant.config import settings
from accelerant.runtime.dispatch.operation import recoverable
from accelerant.tensors import table
from accelerant.tensors.table import dim_of, elementwise, expression, operand, reduction, strided, wide
from accelerant.tensors.tensor import DeviceTensor, TensorDevice, aten, note_fallback, register


# --- matrix products -------------------------------------------------------------------------------------------------
def _product(place: TensorDevice, a: Any, b: Any) -> DeviceTensor:
    """Return the batched product; the sizes are checked."""
    a, b = operand(place, a), operand(place, b)
    if a.dim() != 3 or b.dim() != 3:
        raise RuntimeError(f"bmm: batch1 and batch2 must be 3D tensors, got {a.dim()}D and {b.dim()}D")
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}")
    if a.shape[2] != b.shape[1] or a.shape[0] != b.shape[0]:
        raise RuntimeError(f"matrices of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    if a.dtype == torch.bool:
        raise NotImplementedError("products of matrices are not implemented for bool; convert them, as by x.int()")
    out = place.empty((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
    if out.numel() and a.shape[2]:
        place.matmul(out, a, b)
    elif out.numel():
        out.zero_()
    return out


def _two_dimensional(place: TensorDevice, a: Any, b: Any) -> tuple[DeviceTensor, DeviceTensor]:
    a, b = operand(place, a), operand(place, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
    a, b = (strided(x, (1, *x.shape), (0, *x.stride())) for x in (a, b))
    return a, b


@register("mm.default")
def _mm(place: TensorDevice, a: Any, b: Any) -> Any:
    out = _product(place, *_two_dimensional(place, a, b))
    return strided(out, out.shape[1:], out.stride()[1:])


register("bmm.default")(_product)


def _added(place: TensorDevice, x: Any, product: DeviceTensor, beta: Any, alpha: Any) -> Any:
    if not table.spreads(x.shape, product.shape) or x.dtype != product.dtype:
        raise RuntimeError(
            f"a tensor of {x.dtype} and shape {tuple(x.shape)} cannot be added to the product, "
            f"of {product.dtype} and {tuple(product.shape)}"
        )
    if beta == 0:
        return product if alpha == 1 else elementwise(place, "{0} * {1}", (product, alpha), product.dtype, out=product)
    if beta == alpha == 1:
        return elementwise(place, "{0} + {1}", (product, x), product.dtype, out=product)
    template = "{0} * {2} + {1} * {3}"
    return elementwise(place, template, (product, x, alpha, beta), product.dtype, out=product)


@register("addmm.default")
def _addmm(place: TensorDevice, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(place, x, _mm(place, a, b), beta, alpha)


@register("baddbmm.default")
def _baddbmm(place: TensorDevice, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(place, x, _product(place, a, b), beta, alpha)


# --- activations -----------------------------------------------------------------------------------------------------
_PHI = "0.5 * (1 + erf({0} * 0.70710678118654752))"
_INNER = "(0.79788456080286536 * ({0} + 0.044715 * {0} * {0} * {0}))"


@register("gelu.default")
def _gelu(place: TensorDevice, x: Any, *, approximate: str = "none") -> Any:
    template = f"{{0}} * ({_PHI})" if approximate == "none" else f"0.5 * {{0}} * (1 + tanh({_INNER}))"
    return elementwise(place, template, (x,), x.dtype)


@register("gelu_backward.default")
def _gelu_backward(place: TensorDevice, dy: Any, x: Any, *, approximate: str = "none") -> Any:
    x0 = "{1}"
    if approximate == "none":
        phi = _PHI.replace("{0}", x0)
        template = f"{{0}} * ({phi} + {x0} * 0.39894228040143268 * exp(-0.5 * {x0} * {x0}))"
    else:
        u = _INNER.replace("{0}", x0)
        e = f"exp(-2 * abs({u}))"  # tanh'(u) = 4 e / (1 + e)^2; 1 - tanh^2 cancels, and the slope grows as x^3
        slope = f"0.79788456080286536 * (1 + 0.134145 * {x0} * {x0})"
        template = f"{{0}} * (0.5 * (1 + tanh({u})) + 2 * {x0} * {e} / ((1 + {e}) * (1 + {e})) * {slope})"
    return elementwise(place, template, (dy, x), x.dtype)


expression("threshold_backward.default", "select({0}, 0, {1} <= {2})")
expression("sigmoid_backward.default", "{0} * {1} * (1 - {1})")
expression("tanh_backward.default", "{0} * (1 - {1} * {1})")


# --- softmax ---------------------------------------------------------------------------------------------------------
def _shifted(place: TensorDevice, x: DeviceTensor, dim: int) -> tuple[DeviceTensor, DeviceTensor]:
    """Return the maximum along a dimension, and the sum of exp(x - maximum)."""
    largest = reduction(place, "max", (x,), [dim], x.dtype, keepdim=True)
    return largest, reduction(place, "sum", (x, largest), [dim], wide(x.dtype), pre="exp(x0 - x1)", keepdim=True)


def _softmax(place: TensorDevice, x: Any, dim: int, half_to_float: bool = False, *, template: str) -> Any:
    dim = dim_of(dim, x.dim())
    if half_to_float or not x.dtype.is_floating_point:
        return NotImplemented
    if not x.dim() or not x.numel():
        return elementwise(place, template, (x, x, 1), x.dtype)
    largest, total = _shifted(place, x, dim)
    return elementwise(place, template, (x, largest, total), x.dtype)


register("_softmax.default")(partial(_softmax, template="exp({0} - {1}) / {2}"))
register("_log_softmax.default")(partial(_softmax, template="{0} - {1} - log({2})"))


def _softmax_gradient(name: str, inputs: int, pre: str, template: str) -> None:
    """Register a gradient: `template` of dy, y and the sum along the dimension of `pre`, which has the first inputs."""

    def run(place: TensorDevice, dy: Any, y: Any, dim: int, dtype: torch.dtype) -> Any:
        dy = operand(place, dy)
        if not y.dim() or not y.numel():
            return elementwise(place, "{0} * 0", (y,), dtype)
        along = [dim_of(dim, y.dim())]
        total = reduction(place, "sum", (dy, y)[:inputs], along, y.dtype, pre=pre, keepdim=True)
        return elementwise(place, template, (dy, y, total), dtype)

    register(name)(run)


_softmax_gradient("_softmax_backward_data.default", 2, "x0 * x1", "{1} * ({0} - {2})")
_softmax_gradient("_log_softmax_backward_data.default", 1, "x0", "{0} - exp({1}) * {2}")


# --- norms -----------------------------------------------------------------------------------------------------------
@register("native_layer_norm.default")
def _layer_norm(place: TensorDevice, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    if not shape or any(tuple(w.shape) != tuple(shape) for w in (weight, bias) if w is not None):
        return NotImplemented  # torch's error
    if list(x.shape[-len(shape) :]) != list(shape):
        return NotImplemented
    dims = list(range(x.dim() - len(shape), x.dim()))
    count = float(math.prod(shape))
    if not x.numel():
        return place.empty(x.shape, x.dtype), *(place.empty(table.reduced(x.shape, dims), x.dtype) for _ in range(2))
    mean = reduction(place, "sum", (x,), dims, wide(x.dtype), post="a / s0", scalars=(count,), keepdim=True)
    rstd = reduction(
        place, "sum", (x, mean), dims, wide(x.dtype), pre="(x0 - x1) * (x0 - x1)", post="1 / sqrt(a / s0 + s1)",
        scalars=(count, eps), keepdim=True,
    )  # fmt: skip
    template, operands = "({0} - {1}) * {2}", [x, mean, rstd]
    if weight is not None:
        template, operands = f"{template} * {{{len(operands)}}}", [*operands, weight]
    if bias is not None:
        template, operands = f"{template} + {{{len(operands)}}}", [*operands, bias]
    return elementwise(place, template, operands, x.dtype), mean, rstd


@register("native_layer_norm_backward.default")
def _layer_norm_backward(
    place: TensorDevice, dy: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    needs: Sequence[bool],
) -> Any:  # fmt: skip
    dy = operand(place, dy)
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    dx = dweight = dbias = None
    if needs[0]:
        count = (float(math.prod(shape)),)
        scaled = (dy,) if weight is None else (dy, weight)
        g = "x0" if weight is None else "x0 * x1"
        n = len(scaled)
        first = reduction(place, "sum", scaled, inner, x.dtype, pre=g, post="a / s0", scalars=count, keepdim=True)
        normal = f"(x{n} - x{n + 1}) * x{n + 2}"
        second = reduction(
            place, "sum", (*scaled, x, mean, rstd), inner, x.dtype, pre=f"{g} * ({normal})", post="a / s0",
            scalars=count, keepdim=True,
        )  # fmt: skip
        gradient = "{0}" if weight is None else "{0} * {6}"
        template = f"{{3}} * ({gradient} - {{4}} - ({{1}} - {{2}}) * {{3}} * {{5}})"
        operands = (dy, x, mean, rstd, first, second, *([] if weight is None else [weight]))
        dx = elementwise(place, template, operands, x.dtype)
    if needs[1] and weight is not None:
        dweight = reduction(place, "sum", (dy, x, mean, rstd), outer, x.dtype, pre="x0 * (x1 - x2) * x3")
    if needs[2] and bias is not None:
        dbias = reduction(place, "sum", (dy,), outer, x.dtype)
    return dx, dweight, dbias


# --- torch's decompositions, which call other operations of the table ------------------------------------------------
def _decomposed(name: str, least: int) -> Callable[..., Any]:
    """Return torch's decomposition of an operation, for tensors of at least some number of dimensions."""
    packet, overload = name.split(".")

    def run(_: TensorDevice, x: Any, *args: Any, **kwargs: Any) -> Any:
        decomposition = decomposition_table[getattr(getattr(aten, packet), overload)]
        return decomposition(x, *args, **kwargs) if x.dim() >= least else NotImplemented  # torch's error

    return run


for _names, _least in (
    ("native_group_norm.default native_group_norm_backward.default native_batch_norm_backward.default", 2),
    ("_native_batch_norm_legit.default _native_batch_norm_legit.no_stats", 2),
    ("logsumexp.default mv.default dot.default", 0),
):
    for _name in _names.split():
        register(_name)(_decomposed(_name, _least))


# --- attention -------------------------------------------------------------------------------------------------------
def _flat(x: DeviceTensor) -> DeviceTensor:
    """Return (B, H, S, D) as (B H, S, D); a copy where the strides do not allow a view."""
    batch, heads, *rest = x.shape
    if batch > 1 and heads > 1 and x.stride(0) != heads * x.stride(1):
        x = x.place.contiguous(x)
    step = x.stride(1) if heads > 1 else x.stride(0)
    return strided(x, (batch * heads, *rest), (step, *x.stride()[2:]))


def _transposed(x: DeviceTensor) -> DeviceTensor:
    return strided(x, (x.shape[0], x.shape[2], x.shape[1]), (x.stride(0), x.stride(2), x.stride(1)))


def _scores(place: TensorDevice, q: Any, k: Any, causal: bool, mask: Any, scale: float) -> DeviceTensor:
    """Return q k^T scale + mask, (B, H, S, T)."""
    scores = _product(place, _flat(q), _transposed(_flat(k)))
    rows, columns = scores.shape[1:]
    scores = strided(scores, (*q.shape[:2], rows, columns), (q.shape[1] * rows * columns, *scores.stride()))
    operands: list[Any] = [scores, scale]
    template = "{0} * {1}"
    if mask is not None:
        template, operands = "{0} * {1} + {2}", [*operands, mask]
        if mask.dtype == torch.bool:
            template, operands = "select({3}, {0} * {1}, {2} != 0)", [*operands, -math.inf]
    if causal:
        template = f"select({{{len(operands)}}}, {template}, i % n0 <= (i / n0) % n1)"
        operands = [*operands, -math.inf]
    elementwise(place, template, operands, scores.dtype, out=scores, integers=(columns, rows))
    return scores


@register("_scaled_dot_product_flash_attention_for_cpu.default")
def _attention(
    place: TensorDevice, q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p:
        return NotImplemented
    q, k, v = (operand(place, x) for x in (q, k, v))
    if q.dtype != wide(q.dtype):  # scores in float32, as torch's
        whole = (place.contiguous(x, wide(q.dtype)) for x in (q, k, v))
        y, lse = _attention(place, *whole, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
        return place.contiguous(y, q.dtype), lse
    scores = _scores(place, q, k, is_causal, attn_mask, q.shape[-1] ** -0.5 if scale is None else scale)
    largest, total = _shifted(place, scores, 3)
    empty = "is_inf({1}) && {1} < 0"  # no key that the mask lets through: zeros, and no gradient
    template = f"select(exp({{0}} - {{1}}) / {{2}}, 0, {empty})"
    elementwise(place, template, (scores, largest, total), q.dtype, out=scores)
    out = _product(place, _flat(scores), _flat(v))
    lse = elementwise(place, f"select({{1}} + log({{0}}), {{2}}, {empty})", (total, largest, math.inf), q.dtype)
    size = (*q.shape[:3], v.shape[3])
    return strided(out, size, (size[1] * out.stride(0), *out.stride())), strided(lse, q.shape[:3], lse.stride()[:3])


@register("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _attention_backward(
    place: TensorDevice, dy: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, dropout_p: float, is_causal: bool, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    dy, q, k, v = (operand(place, x) for x in (dy, q, k, v))
    if q.dtype != wide(q.dtype):
        whole = (place.contiguous(x, wide(q.dtype)) for x in (dy, q, k, v, y))
        found = _attention_backward(place, *whole, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        return tuple(place.contiguous(d, q.dtype) for d in found)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    p = _scores(place, q, k, is_causal, attn_mask, factor)
    elementwise(place, "exp({0} - {1})", (p, strided(lse, (*lse.shape, 1), (*lse.stride(), 1))), q.dtype, out=p)
    dv = _product(place, _transposed(_flat(p)), _flat(dy))
    dp = _product(place, _flat(dy), _transposed(_flat(v)))
    delta = reduction(place, "sum", (dy, y), [3], q.dtype, pre="x0 * x1", keepdim=True)
    flat_delta = _flat(delta)
    ds = elementwise(place, "{0} * ({1} - {2}) * {3}", (_flat(p), dp, flat_delta, factor), q.dtype, out=dp)
    dq = _product(place, ds, _flat(k))
    dk = _product(place, _transposed(ds), _flat(q))
    return tuple(strided(d, x.shape, (x.shape[1] * d.stride(0), *d.stride())) for d, x in ((dq, q), (dk, k), (dv, v)))


# --- losses ----------------------------------------------------------------------------------------------------------
def _picked(place: TensorDevice, x: Any, target: Any) -> tuple[Any, Any]:
    """Return log-probabilities as (rows, classes) and targets as (rows, 1)."""
    target = operand(place, target)
    rows = strided(x, (1, *x.shape), (0, *x.stride())) if x.dim() == 1 else x
    if isinstance(target, int):  # one element of the host
        target = place.upload(torch.tensor([target]))
    return rows, strided(target, (rows.shape[0], 1), (target.stride(0) if target.dim() else 1, 1))


def _are_classes(x: Any, target: Any) -> bool:
    """Return whether targets are one class for each row of x, which has one or two dimensions."""
    one = target.dim() <= 1 and target.numel() == 1 if x.dim() == 1 else target.shape == x.shape[:1] and x.dim() == 2
    return one and target.dtype in (torch.int64, torch.uint8)


@register("nll_loss_forward.default")
def _nll_loss(place: TensorDevice, x: Any, target: Any, weight: Any, reduce: int, ignore_index: int) -> Any:
    if weight is not None or not _are_classes(x, target):
        return NotImplemented
    rows, index = _picked(place, x, target)
    losses = place.empty(index.shape, x.dtype)
    flags = elementwise(place, "select(1, 0, {0} == {1})", (index, ignore_index), x.dtype, compute=torch.int64)
    if losses.numel():
        chosen = "select({0}, 0, {0} == {1})"
        place.gather(losses, rows, 1, elementwise(place, chosen, (index, ignore_index), torch.int64))
    elementwise(place, "select(-{0}, 0, {1} == 0)", (losses, flags), x.dtype, out=losses)
    if reduce == 0:
        shape = x.shape[:-1]
        return strided(losses, shape, (1,) * len(shape)), place.empty((0,), x.dtype).new_zeros(())
    count = reduction(place, "sum", (flags,), [0, 1], x.dtype)
    total = reduction(place, "sum", (losses,), [0, 1], x.dtype)
    return (elementwise(place, "{0} / {1}", (total, count), x.dtype) if reduce == 1 else total), count


@register("nll_loss_backward.default")
def _nll_loss_backward(
    place: TensorDevice, dy: Any, x: Any, target: Any, weight: Any, reduce: int, ignore_index: int, total_weight: Any
) -> Any:
    each = reduce == 0 and x.dim() == 2
    if weight is not None or not _are_classes(x, target) or dy.numel() != (len(x) if each else 1):
        return NotImplemented
    rows, index = _picked(place, x, target)
    dx = place.empty(rows.shape, x.dtype)
    if not dx.numel():
        return strided(dx, x.shape, dx.stride()[-x.dim() :])
    elementwise(place, "{0}", (0,), x.dtype, out=dx)
    dy = operand(place, dy)
    if isinstance(dy, DeviceTensor) and dy.dim():
        dy = strided(dy, index.shape, (dy.stride(0), 1))
    flags = elementwise(place, "select(-1, 0, {0} == {1})", (index, ignore_index), x.dtype, compute=torch.int64)
    if reduce == 1:
        template = "select({0} * {1} / {2}, 0, {0} == 0)"  # 0 / 0 where all are ignored
        values = elementwise(place, template, (flags, dy, total_weight), x.dtype)
    else:
        values = elementwise(place, "select({0} * {1}, 0, {0} == 0)", (flags, dy), x.dtype)
    place.scatter(dx, 1, index, values, add=False, check=False)  # checked forward
    return strided(dx, x.shape, dx.stride()[-x.dim() :])


@register("mse_loss.default")
def _mse_loss(place: TensorDevice, x: Any, y: Any, reduce: int = 1) -> Any:
    if x.dtype != y.dtype or not x.dtype.is_floating_point:
        return NotImplemented
    y = table.on_device(place, y)
    if reduce == 0 or x.shape != y.shape:
        return NotImplemented if reduce else elementwise(place, "({0} - {1}) * ({0} - {1})", (x, y), x.dtype)
    post, count = ("a / s0", (float(x.numel()),)) if reduce == 1 else ("a", ())
    dims = list(range(x.dim()))
    return reduction(place, "sum", (x, y), dims, x.dtype, pre="(x0 - x1) * (x0 - x1)", post=post, scalars=count)


@register("mse_loss_backward.default")
def _mse_loss_backward(place: TensorDevice, dy: Any, x: Any, y: Any, reduce: int) -> Any:
    factor = 2.0 / x.numel() if reduce == 1 and x.numel() else 2.0
    return elementwise(place, "{0} * {3} * ({1} - {2})", (dy, x, y, factor), x.dtype)


# --- optimizers ------------------------------------------------------------------------------------------------------
def _update(place: TensorDevice, out: DeviceTensor, template: str, rule: Callable[..., Any], *operands: Any) -> None:
    """Write a template of operands to `out`; if its launch fails, compute `rule`, whose operations may fall back."""
    try:
        elementwise(place, template, operands, out.dtype, compute=wide(out.dtype), out=out)
    except Exception as error:
        if not recoverable(error) or settings().fallback == "forbid":
            raise
        func, reason = aten._fused_adamw_.default, f"{type(error).__name__}: {error}"
        note_fallback(func, place, "its operations", reason, f"{func}: {reason}; its operations run one by one")
        out.copy_(rule(*(x.to(wide(out.dtype)) if isinstance(x, DeviceTensor) else x for x in operands)))


def _first(m: Any, g: Any, w: float, s: Any, sign: float) -> Any:
    return m + w * (g / s * sign - m)


def _second(v: Any, g: Any, b: float, w: float, s: Any) -> Any:
    return b * v + w * (g / s) * (g / s)


@register("_fused_adamw_.default")
def _fused_adamw(
    place: TensorDevice, params: Any, grads: Any, firsts: Any, seconds: Any, largest: Any, steps: Any, *, lr: float,
    beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None,
    found_inf: Any = None, out: Any = None,
) -> Any:  # fmt: skip
    if amsgrad or found_inf is not None:
        return NotImplemented
    sign, scale = -1.0 if maximize else 1.0, 1.0 if grad_scale is None else grad_scale
    for p, g, m, v, step in zip(params, grads, firsts, seconds, steps, strict=True):
        size, root = lr / (1 - beta1 ** float(step)), math.sqrt(1 - beta2 ** float(step))
        w, u = 1 - beta1, 1 - beta2
        _update(  # the parameter first, since moments of two bytes may round to 0
            place, p,
            "{0} * {4} - {5} * ({1} + {8} * ({3} / {11} * {12} - {1})) "
            "/ (sqrt({9} * {2} + {10} * ({3} / {11}) * ({3} / {11})) / {6} + {7})",
            lambda p, m, v, g, kept, size, root, eps, w, b, u, s, sign: (
                p * kept - size * _first(m, g, w, s, sign) / (_second(v, g, b, u, s).sqrt() / root + eps)
            ),
            p, m, v, g, 1 - lr * weight_decay, size, root, eps, w, beta2, u, scale, sign,
        )  # fmt: skip
        _update(place, m, "{0} + {2} * ({1} / {3} * {4} - {0})", _first, m, g, w, scale, sign)
        _update(place, v, "{2} * {0} + {3} * ({1} / {4}) * ({1} / {4})", _second, v, g, beta2, u, scale)
    return None
