"""Serve a language model by Ray Serve: replicas of the engine, each with its own cache, behind one address.

    python examples/ray_served_model.py

A Llama of 2 layers with random weights, so that nothing is downloaded. Needs accelerant[ray] and ray[serve].
`accelerant serve --engine ray --model FOLDER` does the same with keys, limits and OpenAI's routes.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import torch
from ray import serve

import accelerant as acl
from accelerant.nn.serving import Engine, Sampling, Token


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=64)
class Model:
    """A replica: the model, and the engine that batches the replica's requests."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "context": 256, "layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "hidden": 96}
        self.engine = Engine(acl.nn.Llama(acl.nn.LlamaConfig(**sizes, rope_scaling=None)), blocks=256)

    async def __call__(self, ids: list[int], tokens: int, seed: int) -> dict[str, Any]:
        """Return the tokens that continue a prompt, computed together with those of other requests."""
        answer = self.engine.submit(ids, Sampling(temperature=0.8), max_tokens=tokens, seed=seed)
        events = await asyncio.to_thread(list, answer)
        return {"tokens": [event.id for event in events if isinstance(event, Token)], "process": os.getpid()}


def main() -> None:
    """Print whether answers are the same from every replica."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        handle = serve.run(Model.bind())
        answers = [one.result(timeout_s=120) for one in [handle.remote([1, 2, 3], 20, seed=5) for _ in range(16)]]
        print(f"replicas: {len({one['process'] for one in answers})}")
        print(f"the same seed, the same tokens: {all(one['tokens'] == answers[0]['tokens'] for one in answers)}")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
