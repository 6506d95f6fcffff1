"""Move a Hugging Face model onto Accelerant's kernels, train it, and move it back.

    python examples/patch_hugging_face.py

A Llama of 2 layers with random weights, so that nothing is downloaded. Needs accelerant[huggingface].
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accelerant as acl


def losses(model: LlamaForCausalLM, steps: int) -> list[float]:
    """Train on one batch; return the loss of each step."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(500, (4, 64), generator=generator).to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())  # not .item(), which would wait for the GPU in every step
    return torch.stack(found).tolist()


def build() -> LlamaForCausalLM:
    """Return the same model each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Print the report of the patch, and the losses with and without it."""
    plain = losses(build(), 20)
    model = build()
    print(acl.nn.patch(model))
    patched = losses(model, 20)
    print(f"first loss {plain[0]:.4f} and patched {patched[0]:.4f}; last {plain[-1]:.4f} and {patched[-1]:.4f}")
    acl.nn.unpatch(model)  # the weights stay; save_pretrained works before and after


if __name__ == "__main__":
    main()
