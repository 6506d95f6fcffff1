"""Generate with vLLM in a process of its own; print tokens and what of accelerant ran: FOLDER QUANTIZATION PLUGINS."""

import json
import os
import sys


def main(folder: str, quantization: str, plugins: str) -> None:
    os.environ |= {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype="float32", block_size=32,
        quantization=quantization or None, disable_log_stats=True, max_num_seqs=4,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 + 1 for j in range(5 + 40 * i)]} for i in range(3)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    tokens = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)]
    layers = sys.modules.get("accelerant._vllm_layers")
    print("RESULT", json.dumps({"tokens": tokens, "calls": dict(layers.calls) if layers else {}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
