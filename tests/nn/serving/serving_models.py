"""A small random Llama for the tests of serving, and what an answer holds."""

import torch

from accelerant.nn import Llama, LlamaConfig
from accelerant.nn.serving import Finished, PromptLogprobs, Sampling

GREEDY = Sampling(temperature=0)
VOCABULARY = 101


def llama(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "context": 256, "layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "hidden": 48,
    }  # fmt: skip
    model = Llama(LlamaConfig(**(sizes | changes), rope_base=1000.0, rope_scaling=None))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def prompt(length, seed=0):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(model, ids, count):
    return model.generate(torch.tensor([ids]), count, temperature=0)[0, len(ids) :].tolist()


def read(answer, n=1):
    """Return tokens, log-probabilities (hexadecimal: bit by bit) and the end of each of n answers."""
    results = [([], [], []) for _ in range(n)]
    for event in answer:
        if isinstance(event, PromptLogprobs):
            assert event.begin == len(results[0][1]) + 1
            results[0][1].extend(map(float.hex, event.logprobs))
            continue
        ids, logprobs, end = results[event.index]
        if isinstance(event, Finished):
            end.append(event)
        else:
            ids.append(event.id)
            logprobs.append(None if event.logprob is None else event.logprob.hex())
    return results if n > 1 else results[0]


def drain(engine):
    while engine.step():
        pass
