"""A small random Llama with a tokenizer and a chat template, and a small random sentence encoder."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from accelerant.nn import Llama, LlamaConfig

TEXT = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_llama(path, *, context=2048, spare=1):
    """Write the folder of a Llama, with `spare` tokens without a text; the last one's embedding is not finite."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    size = tokenizer.get_vocab_size() + spare
    config = LlamaConfig(
        vocab_size=size, context=context, layers=2, heads=4, kv_heads=2, width=64, hidden=96, rope_scaling=None
    )
    model = Llama(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # a peaked distribution
        model.embed.weight[size - 1] = torch.nan
        model.lm_head.weight[size - 1] = 0
    model.save_pretrained(path)
    described = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"bos_token_id": 0, "eos_token_id": 1}))
    return size


def write_encoder(path):
    """Write the folder of a BERT."""
    from transformers import BertConfig, BertModel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=40, **sizes)).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(path / "tokenizer.json"))
