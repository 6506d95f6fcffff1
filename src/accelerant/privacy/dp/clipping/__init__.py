"""Per-example clipping by book-keeping: the sum of clipped per-example gradients from one backward pass.

>>> clipper = PerExampleClipper(model, max_grad_norm=1.0)
>>> loss.backward()                       # p.grad: sum over examples of min(1, C / ||g_i||) g_i
>>> clipper.norms, clipper.factors        # (B,) each

The backward pass computes gradients of activations only, and keeps the factors of each parameter's gradient. At its
end all norms are known, and one more product gives the clipped sum. An example is an entry of the first dimension of
the model's input.

Exact per-example gradients of
    torch.nn    Linear, Embedding (padding_idx too), LayerNorm, RMSNorm, GroupNorm, InstanceNorm without running
                statistics, Conv1d, Conv2d (groups, stride, padding in every mode, dilation), PReLU, MultiheadAttention
                (batch_first), LSTM and GRU (batch_first; no projections, no packed sequences)
    accelerant  Linear, LayerNorm, RMSNorm, Conv2d, LSTM, GRU; GPT and Llama with all that is inside
    transformers  Conv1D, the RMS norms of Llama, Mistral, Qwen2 and Qwen3; so GPT-2, Llama, BERT, ViT
and of modules made of these, with biases, LoRA adapters, parameters that several layers share (an embedding tied to an
output layer with its cross term), and layers called several times. Frozen parameters cost nothing. Other modules with
parameters of their own (a scale, a class token, Conv3d, ConvTranspose, weight_norm and other parametrizations) need no
rule: their forward runs for each example by itself, by torch's vmap, and keeps B times those parameters
(clipper.py). `LayerRule` and `register` add cheaper ones (rules.py).

Memory kept until the pass ends, in addition to that of the backward pass of activations: for each layer both factors
(its inputs and the gradients of its outputs), or its per-example gradients, B times its size in the dtype that it
computes in, whichever takes less time (backward_pass.py). With `clipping="per_layer"` it is freed after each layer.

Works with autocast, CUDA graphs, checkpointing (use_reentrant=False), several passes before a step, and torch.compile,
which leaves these layers to Python.

Refused by name: BatchNorm (it mixes examples) unless it is in eval mode and frozen, modules whose forward cannot run
for each example by itself, or gives another result then. A parameter that is used outside of its layer is detected in
the backward pass, and refused there. Copies and files of the model are ordinary models.

Source: Bu, Wang, Zha and Karypis 2022, arXiv:2210.00038 (book-keeping); Abadi et al. 2016, arXiv:1607.00133 (DP-SGD).
"""

from __future__ import annotations

from accelerant.privacy.dp.clipping.clipper import PerExampleClipper
from accelerant.privacy.dp.clipping.layers import scale_shift
from accelerant.privacy.dp.clipping.rules import LayerRule, register

__all__ = ["LayerRule", "PerExampleClipper", "register", "scale_shift"]
