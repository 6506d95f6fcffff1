"""Models split over processes: FSDP2 by blocks (`shard`), and tensor parallelism, 1/N of every layer of a Llama.

    attention   heads / N of the queries, kv_heads / N of keys and values: rows of qkv, columns of the projection
    MLP         hidden / N: rows of gate and up, columns of down
    vocabulary  vocab_size / N: rows of the embedding and of the output layer

A block adds up partial results twice, and in the backward pass gradients twice. The loss exchanges the log-sum-exp and
the target's logit of each token:

    L_r = log sum_{j in r} exp x_j        L = m + log sum_r exp(L_r - m), m = max_r L_r        loss = L - x_target

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; Zhao et al. 2023, arXiv:2304.11277; Shoeybi et al. 2019,
arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from accelerant import ops
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn.layers import Linear, RMSNorm, rms_eps
from accelerant.nn.models import hugging_face
from accelerant.nn.models.language_model import Cache
from accelerant.nn.models.llama import GatedMLP, Llama, LlamaAttention, decode_linear, load_model
from accelerant.nn.models.tokenizer import ModelTokenizer
from accelerant.nn.quantization import LinearInt8
from accelerant.ops.cross_entropy import check_loss, check_targets
from accelerant.ops.decode.steps import usual_plan
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.processes import PeerSum

# --- fully sharded models --------------------------------------------------------------------------------------------
M = TypeVar("M", bound=nn.Module)


def group_of(mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the processes of a group or of a mesh of one dimension, all for None; ConfigError for others."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: start with torchrun and call init_process_group")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ConfigError(f"expected a mesh of one dimension, got {mesh.mesh_dim_names}: pass one, as mesh['name']")
        return mesh.get_group()
    if mesh is None:
        return dist.group.WORLD  # type: ignore[return-value]  # initialized, as checked above
    return mesh


def shard(model: M, mesh: DeviceMesh, *, precision: torch.dtype | None = None, reshard_after_forward: bool = True) -> M:
    """Shard a model's parameters over processes by FSDP2, block by block.

    Every process calls it with the same parameters and from then on calls the model on its own examples. Gradients are
    the mean over the processes. Create the optimizer afterwards: accelerant.nn.optim clips by the norm over all
    processes. Call `loss` or the model itself; other methods see parts of the parameters.

    Args:
        model: a model of accelerant.nn, a patched Hugging Face model, or another module whose blocks are in an
            nn.ModuleList; modified in place. It may be a Llama that `tensor_parallel` split over another dimension of
            the mesh.
        mesh: of one dimension; or two, of which parameters are sharded over the last and repeated over the first.
        precision: dtype in which parameters are gathered and layers compute, bfloat16 or float16; gradients are reduced
            and parameters updated in their own dtype. None: their own. TrainStep(precision=) of the same dtype adds a
            loss in float32.
        reshard_after_forward: free a block's parameters after its forward pass. False keeps those of all blocks for the
            backward pass, in `precision`: one gather less in a step.

    Returns:
        the model.

    Raises:
        ConfigError: torch.distributed is not initialized; a precision or number of dimensions not listed above.
        UnsupportedCase: the model is sharded already, or has no blocks.
    """
    group_of(None)  # raises without processes
    if mesh.ndim > 2:
        raise ConfigError(f"shard takes a mesh of one or two dimensions, got {mesh.mesh_dim_names}")
    if precision not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"precision must be bfloat16, float16, float32 or None, got {precision}")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedCase(f"this {type(model).__name__} is sharded already")
    if not (blocks := _blocks(model)):
        raise UnsupportedCase(
            f"shard takes a model with blocks in an nn.ModuleList, {type(model).__name__} has none: call torch's "
            "fully_shard on its parts"
        )
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=None if precision is None else torch.float32)
    # A block's inputs have the right dtype already; the rotary tables among them stay in float32.
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for block in blocks:  # the backward pass begins with the last one
        free = reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    changed: Any = model
    for name in ("loss", "prefill"):
        if hasattr(model, name):
            register_fsdp_forward_method(changed, name)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost lists of modules of one class, with parameters."""
    blocks: list[nn.Module] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if not isinstance(module, nn.ModuleList) or inside or len({type(each) for each in module}) != 1:
            continue
        if all(next(each.parameters(), None) is not None for each in module):
            lists.append(name)
            blocks += module
    return blocks


# --- exchanges -------------------------------------------------------------------------------------------------------
def _enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, before layers that are split; the gradients of the parts add up."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _leave(x: Tensor, mesh: DeviceMesh, sums: PeerSum | None = None, *, columns: bool = False) -> Tensor:
    """Return the sum of partial results, or `columns` side by side; without a gradient `sums` may take x, in place."""
    if sums is not None and not columns and not torch.is_grad_enabled() and sums.takes(x):
        return sums(x)
    parts = DTensor.from_local(x, mesh, [Shard(x.dim() - 1) if columns else Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def vocabulary_parallel_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the mean cross entropy of the logits hidden W^T, of whose rows W each process holds an equal part.

    Args:
        hidden: (M, K), the same in each process; float16, bfloat16, float32 or float64.
        weight: (V / N, K), rows r V / N and following in process r; dtype of hidden.
        targets: (M,), int64 or int32, classes in [0, V), or -100 for a row that does not count.
        mesh: the processes, of one dimension.

    Returns:
        a scalar, float32 (float64 for float64), the same in each process. Raises as linear_cross_entropy, which finds
        L_r without materialized logits. 2 M numbers are summed over the processes, and M maximized.
    """
    group = group_of(mesh)
    check_loss("vocabulary_parallel_cross_entropy", targets, hidden.shape[:-1], 0.0, "mean")
    check_targets(targets, weight.shape[0] * dist.get_world_size(group), -100)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    hidden = _enter(hidden, mesh)
    # With label smoothing 1 the loss is L_r - mean x_j, without a target: our op gives L_r without materialized logits.
    anything = torch.zeros_like(targets)
    spread = ops.linear_cross_entropy(hidden, weight, anything, label_smoothing=1.0, reduction="none")
    mine = spread.to(wide) + (hidden.to(wide) * weight.mean(0, dtype=wide)).sum(-1)
    local = targets.long() - dist.get_rank(group) * weight.shape[0]
    here = (local >= 0) & (local < weight.shape[0])
    rows = ops.embedding(torch.where(here, local, 0), weight)
    chosen = torch.where(here, (hidden.to(wide) * rows.to(wide)).sum(-1), 0.0)
    largest = mine.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total, logit = _leave(torch.stack(((mine - largest).exp(), chosen)), mesh).unbind()
    counted = targets != -100
    return torch.where(counted, largest + total.log() - logit, 0.0).sum() / counted.sum()


_LINEAR_SUM = TritonKernel("accelerant.distributed.triton_kernels", "linear_sum")


def _summed(x: Tensor, weight: Tensor, residual: Tensor, sums: PeerSum) -> Tensor:
    """Return residual + the sum of the processes' x W^T in one kernel, for a row x (1, K) and weight (N, K)."""
    N, K = weight.shape
    y, plan = torch.empty_like(residual), usual_plan(N, K, weight.element_size(), False)
    constants = {"SETS": plan.sets, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k, "UNROLL": plan.unroll}
    grid = (N // (plan.sets * plan.block_n),)
    sums.launch_outputs(_LINEAR_SUM, grid, (x, weight, residual, y), (N, K), constants, plan.num_warps)
    return y


# --- layers ----------------------------------------------------------------------------------------------------------
class _Split:
    """The part of a layer's weight that this process holds, as a plain tensor; the parameter is a DTensor."""

    mesh: DeviceMesh
    sums: PeerSum
    _parameters: dict[str, Any]
    sections: tuple[int, ...] = ()
    """Rows of the matrices that the whole weight consists of, each of which is split; empty for one matrix."""

    @property
    def weight(self) -> Tensor:
        parameter: Tensor = self._parameters["weight"]
        return _local(parameter)


def _local(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:  # two while FSDP2 has sharded it too
        return parameter.to_local()
    return parameter


class _SplitLinear(_Split, Linear):  # type: ignore[override]  # a property in place of the attribute
    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]  # a property, as above
        parameter: Tensor | None = self._parameters["bias"]
        return None if parameter is None else _local(parameter)


class _SplitEmbedding(_Split, nn.Embedding):  # type: ignore[override]  # as above
    def forward(self, idx: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        if idx.device.type == "cpu" and idx.numel():
            vocabulary, wrong = rows * self.mesh.size(), [int(x) for x in torch.aminmax(idx)]
            if wrong[0] < 0 or wrong[1] >= vocabulary:
                raise ConfigError(f"tokens must be in [0, {vocabulary}), got {wrong[0] if wrong[0] < 0 else wrong[1]}")
        local = idx.long() - self.mesh.get_local_rank() * rows
        here = (local >= 0) & (local < rows)
        found = ops.embedding(torch.where(here, local, 0), self.weight)
        return _leave(found.masked_fill(~here.unsqueeze(-1), 0.0), self.mesh, self.sums)


class _SplitAttention(LlamaAttention):
    mesh: DeviceMesh
    sums: PeerSum

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Cache, int] | None = None) -> Tensor:
        return _leave(super().forward(_enter(x, self.mesh), cos, sin, cache), self.mesh, self.sums)

    def _normalized(self, x: Tensor, norm: RMSNorm | None, invariant: bool) -> Tensor:
        if norm is None or invariant:  # without gradients
            return super()._normalized(x, norm, invariant)
        return ops.rms_norm(x, _enter(norm.weight, self.mesh), eps=rms_eps(norm, x))  # each process has other heads


class _SplitMLP(GatedMLP):
    mesh: DeviceMesh
    sums: PeerSum

    def forward(self, x: Tensor) -> Tensor:
        return _leave(super().forward(_enter(x, self.mesh)), self.mesh, self.sums)


class _TensorParallelLlama(Llama):
    mesh: DeviceMesh
    sums: PeerSum
    needs_equal_batches = True
    _layers = (_SplitAttention, _SplitMLP)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._require_targets(idx, targets)
        rows = self.hidden(idx).flatten(0, 1)
        return vocabulary_parallel_cross_entropy(
            rows, self._output_weight().to(rows.dtype), targets.flatten(), self.mesh
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = _enter(hidden, self.mesh).reshape(-1, self.config.width)
        head: Any = self._head()
        int8 = isinstance(head, LinearInt8)
        logits = head(rows) if int8 else ops.matmul(rows, self._output_weight().to(hidden.dtype).t())
        return _leave(logits, self.mesh, columns=True).view(*hidden.shape[:-1], self.config.vocab_size)

    def cache_shape(self) -> tuple[int, int, int]:
        layers, kv_heads, width = super().cache_shape()
        return layers, kv_heads // self.mesh.size(), width

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        return _leave(super().decode(tokens, cache), self.mesh, columns=True)

    def score(self, hidden: Tensor, *, invariant: bool = False) -> Tensor:
        return _leave(super().score(hidden, invariant=invariant), self.mesh, columns=True)

    def _joined(self, layer: nn.Module, x: Tensor, residual: Tensor, invariant: bool = False) -> Tensor:
        weight: Any = layer.weight_int8 if isinstance(layer, LinearInt8) else layer.weight
        if (
            not invariant
            and x.shape[0] == 1
            and weight.dtype is x.dtype
            and self.sums.takes_outputs(weight.shape[0], x.dtype)
        ):
            return _summed(x, weight, residual, self.sums)
        added = None if self.mesh.get_local_rank() else residual  # in the sum once
        return self.sums(decode_linear(layer, x, residual=added, invariant=invariant))

    def generate(self, idx: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        if options.get("seed") is None and options.get("generator") is None and options.get("temperature", 1.0) != 0:
            seed = torch.randint(2**62, (1,), device=idx.device)  # every process draws the same tokens
            dist.broadcast(seed, group=self.mesh.get_group(), group_src=0)
            options["seed"] = int(seed)
        return super().generate(idx, max_new_tokens, **options)

    def save_pretrained(self, path: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write the whole model from the first process, as LanguageModel.save_pretrained; every process calls it."""
        if state := whole_state_dict(self):
            with torch.device("meta"):
                whole = Llama(self.config)
            whole.load_state_dict(state, assign=True)
            hugging_face.save(whole, self.config, path, self._layouts, max_shard_bytes=max_shard_bytes)
        dist.barrier()


# --- splitting and joining -------------------------------------------------------------------------------------------
def tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Split a Llama's layers over processes that compute the same tokens together.

    Every process calls it with the same weights, which may be on the CPU: only its part goes to the mesh's device. Then
    `loss`, `generate` (each process has its heads' cache), `forward` and `save_pretrained` are called in every process
    with the same arguments, and return the same. `accelerant.distributed.shard` may follow, with another dimension of
    the mesh.

    Args:
        model: a Llama of accelerant.nn; modified in place.
        mesh: of one dimension, of N processes.

    Returns:
        the model.

    Raises:
        UnsupportedCase: another model, layers of another class, or biases other than those of queries, keys and values.
        ConfigError: N does not divide kv_heads, hidden and vocab_size; or as accelerant.distributed.shard.
    """
    group_of(mesh)
    if type(model) is not Llama:
        raise UnsupportedCase(f"tensor_parallel splits the layers of nn.Llama, got {type(model).__name__}")
    changed: Any = model
    config, size = model.config, mesh.size()
    for name in ("kv_heads", "hidden", "vocab_size"):
        if getattr(config, name) % size:
            raise ConfigError(f"{name} must be a multiple of the {size} processes, got {getattr(config, name)}")
    q, kv, hidden = config.heads * config.head_size, config.kv_heads * config.head_size, config.hidden
    of_block: dict[str, tuple[int, tuple[int, ...]]] = {
        "attention.qkv": (0, (q, kv, kv)), "attention.projection": (1, ()),
        "mlp.gate_up": (0, (hidden, hidden)), "mlp.down": (1, ()),
    }  # fmt: skip
    splits = {f"blocks.{i}.{name}": each for i in range(config.layers) for name, each in of_block.items()}
    if model.lm_head is not None:
        splits["lm_head"] = (0, ())
    for name in splits:
        layer = model.get_submodule(name)
        usual = type(layer) in (Linear, LinearInt8) and not getattr(layer, "dynamic", False)
        if not usual or (layer.bias is not None and not name.endswith("qkv")):
            raise UnsupportedCase(
                f"tensor_parallel splits nn.Linear and LinearInt8, with a bias in qkv alone; {name} is {layer}"
            )
    sums = PeerSum(mesh)
    for name, (dim, sections) in {**splits, "embed": (0, ())}.items():
        _split(model.get_submodule(name), mesh, dim, sections)
    changed.embed.sums = sums
    for block in model.blocks:
        block.attention.heads, block.attention.kv_heads = config.heads // size, config.kv_heads // size
        block.attention.__class__, block.mlp.__class__ = _SplitAttention, _SplitMLP
        block.attention.mesh = block.mlp.mesh = mesh
        block.attention.sums = block.mlp.sums = sums
    changed.__class__, changed.mesh, changed.sums = _TensorParallelLlama, mesh, sums
    return changed.to(mesh.device_type)  # type: ignore[no-any-return]


def load_split_model(
    path: str | os.PathLike[str], device: torch.device, *, quantize: str | None = None
) -> tuple[Llama, ModelTokenizer]:
    """Return this process's part of a folder's model on its device, and the tokenizer; every process calls it.

    Each reads the whole model to the host first. Arguments and errors as of accelerant.nn.load_model and
    `tensor_parallel`.
    """
    model, tokenizer = load_model(path, device="cpu", quantize=quantize)
    return tensor_parallel(model, init_device_mesh(device.type, (dist.get_world_size(),))), tokenizer


def _split(layer: Any, mesh: DeviceMesh, dim: int, sections: tuple[int, ...] = ()) -> None:
    """Keep this process's part of a layer's weight: of each section, if there are several."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def part(whole: Tensor) -> Tensor:
        matrices = whole.detach().split(sections or whole.shape[0])
        return torch.cat([matrix.chunk(size, dim)[rank] for matrix in matrices]).to(mesh.device_type, copy=True)

    def parameter(whole: nn.Parameter) -> nn.Parameter:
        distributed = DTensor.from_local(part(whole), mesh, [Shard(dim)], run_check=False)
        return nn.Parameter(distributed, requires_grad=whole.requires_grad)

    if isinstance(layer, LinearInt8):  # whose integers and scales are those of the whole rows
        layer.weight_int8 = local = part(layer.weight_int8)
        layer.scale = layer.scale if dim else part(layer.scale)
        if layer.bias is not None:
            layer.bias = nn.Parameter(part(layer.bias), requires_grad=layer.bias.requires_grad)
        layer.out_features, layer.in_features = local.shape
        return
    weight, bias = layer.weight, getattr(layer, "bias", None)
    layer.__class__ = _SplitEmbedding if isinstance(layer, nn.Embedding) else _SplitLinear
    layer.sections, layer.mesh = sections, mesh
    layer._parameters["weight"] = parameter(weight)
    if bias is not None:
        layer._parameters["bias"] = parameter(bias)
    local = layer.weight
    if isinstance(layer, nn.Embedding):
        layer.num_embeddings = local.shape[0]
    else:
        layer.out_features, layer.in_features = local.shape


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights of a model that is split by `tensor_parallel`, `shard` or both, on the CPU.

    Every process calls it; the first process of all gets the weights, others an empty dict. One parameter at a time is
    whole on a device. The names and shapes are those of the model before it was split.
    """
    if isinstance(model, _TensorParallelLlama) and any(isinstance(each, LinearInt8) for each in model.modules()):
        raise UnsupportedCase("a model in integers that is split is not joined again: keep the folder it was read from")
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        if sections := getattr(layer, "sections", ()):
            size = layer.mesh.size()
            parts = [part.split([rows // size for rows in sections]) for part in whole.chunk(size)]
            whole = torch.cat([part[number] for number in range(len(sections)) for part in parts])
        if dist.get_rank() == 0:
            state[name] = whole.detach().cpu()
    return state
