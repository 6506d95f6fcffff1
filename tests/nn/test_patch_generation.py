"""patch with CUDA graphs where tokens are generated: what generate() and loops of one's own give is what they gave."""

import copy
import pickle

import pytest
import torch
from patch_models import CAUSAL, VOCABULARY, make, transformers
from test_patch_graphs import BEFORE, on_cpu  # noqa: F401
from tiny_models import FAMILIES as TINY
from tiny_models import tiny
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

import accelerant as acl
from accelerant.nn.patching import generation, graphs
from processes import in_threads

FAMILIES = (*CAUSAL, "gemma2", "gemma3", "phi3")
SETTINGS = {"eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch):
    monkeypatch.setattr(generation, "_SMALLEST", 16)
    monkeypatch.setattr(generation, "_AHEAD", 4)


def pair(family, **settings):
    """A model, and its copy that is patched."""
    model = make(family, **SETTINGS | settings).eval()
    other = copy.deepcopy(model)
    other.report = acl.nn.patch(other, graph=True)
    return model, other


def prompt(length, rows=1, seed=0):
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : row * length // (2 * rows)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generated(model, inputs, **options):
    torch.manual_seed(0)
    options = {
        "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
    } | options  # fmt: skip
    return model.generate(**inputs, **options)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-5)
    assert type(found.past_key_values) is DynamicCache
    assert found.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    for one, two in zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.values, two.values, rtol=1e-4, atol=1e-5)


def assert_alike(pair, inputs, **options):
    wanted, found = (generated(each, inputs, **options) for each in pair)
    assert_same(found, wanted)
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_caches_are_the_models(family, rows):
    both = pair(family)
    for length, new in ((5, 8), (9, 30), (3, 20), (5, 8)):
        assert_alike(both, prompt(length, rows, seed=length), max_new_tokens=new)
    replayed = both[1].report.graphs["replayed"]
    assert replayed > 30
    assert_alike(both, prompt(6, rows), max_new_tokens=12)  # as long as one before: no call is eager
    assert both[1].report.graphs["replayed"] == replayed + 11


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [
    {"do_sample": True, "top_k": 7, "temperature": 0.7}, {"num_return_sequences": 3, "do_sample": True},
    {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}, {"output_scores": True},
    {"output_hidden_states": True}, {"output_attentions": True}, {"eos_token_id": [5, 40, 41, 42, 43]},
], ids=lambda options: next(iter(options)))  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ways_to_generate(family, options):
    both = pair(family)
    for each in both:
        if "output_attentions" in options:
            each.set_attn_implementation("eager")
    for seed in range(3):
        wanted, found = (generated(each, prompt(6, seed=seed), **options) for each in both)
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.keys() == wanted.keys()
        for name in ("scores", "hidden_states", "attentions"):
            torch.testing.assert_close(found.get(name), wanted.get(name), rtol=1e-4, atol=1e-5)


def test_autocast_embeddings_and_inference_mode():
    both = pair("llama")
    for mode in (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)):
        for _ in range(2):
            with mode():
                embeds = [each.get_input_embeddings()(prompt(5)["input_ids"]) for each in both]
                found = [generated(each, {"inputs_embeds": x}) for each, x in zip(both, embeds, strict=True)]
            assert torch.equal(found[0].sequences, found[1].sequences)
    assert both[1].report.graphs["replayed"] > 20


def test_streamers_processors_and_criteria_see_each_step():
    both, seen = pair("qwen2"), ([], [])

    class Streamer:
        def __init__(self, to):
            self.put, self.end = to.append, lambda: to.append(torch.zeros(1))

    for each, to in zip(both, seen, strict=True):
        stops = StoppingCriteriaList([lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 19)])
        double = LogitsProcessorList([lambda ids, scores: scores * (1 + ids.shape[1] % 2)])
        for _ in range(2):
            to.append(generated(each, prompt(5), stopping_criteria=stops, logits_processor=double).sequences)
            generated(each, prompt(5), streamer=Streamer(to))
    torch.testing.assert_close(seen[1], seen[0])


def test_caches_that_are_kept_are_not_written_to_by_later_calls():
    both = pair("llama")
    kept = []
    for seed in range(4):
        found = assert_alike(both, prompt(5, seed=seed))
        cache = found.past_key_values
        held = [cache, None, cache.layers[0].keys, copy.copy(cache)][seed]
        kept.append((held, [x.clone() for each in cache.layers for x in (each.keys, each.values)]))
        del found, cache, held
    for seed in range(2):
        assert_alike(both, prompt(7, seed=seed))
    for cache, values in kept:
        if isinstance(cache, torch.Tensor):
            assert torch.equal(cache, values[0])
        elif cache is not None:
            now = [x for each in cache.layers for x in (each.keys, each.values)]
            assert all(map(torch.equal, now, values))
    for step in range(3):  # a kept cache goes on
        token = torch.full((1, 1), 7 + step)
        with torch.no_grad():
            first = kept[0][0]
            again = both[0](input_ids=token, past_key_values=copy.deepcopy(first)).logits
            torch.testing.assert_close(both[1](input_ids=token, past_key_values=first).logits, again)


def test_a_kept_cache_leaves_the_graph_its_memory():
    both = pair("llama")
    kept = [assert_alike(both, prompt(5, seed=seed), max_new_tokens=8).past_key_values for seed in range(3)]
    assert both[1].report.graphs["captured"] == 1
    assert len({each.layers[0].keys.data_ptr() for each in kept}) == 3


def stepped(model, cache, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, past_key_values=cache, use_cache=True).logits


@pytest.mark.sample(2, 1)
@pytest.mark.search(20)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_any_use_of_caches_gives_what_it_gave(family, rng, record_property):
    both, caches, ids = pair(family, **({"n_positions": 256} if family == "gpt2" else {})), [], 0
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in both]
    for _ in range(120):
        action = rng.choice(["new", *["add"] * 12, "several", "crop", "select", "train", "copy", "as it was", "forget"])
        if action == "new" or not caches:
            tokens = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(2, 9))]] * 2)
            found = [DynamicCache(config=each.config) for each in both]
            caches.append(found)
        else:
            found = rng.choice(caches)
            tokens = torch.tensor([[rng.randrange(3, VOCABULARY)]] * found[0].layers[0].keys.shape[0])
        if action == "crop" and family == "llama" and found[0].get_seq_length() > 3:
            for cache in found:
                cache.crop(-2)
        elif action == "select" and found[0].get_seq_length():
            for cache in found:
                cache.reorder_cache(torch.tensor([1, 0][: len(tokens)]) % len(tokens))
        elif action == "copy" and found[0].get_seq_length():
            caches.append(copy.deepcopy(found))
        elif action == "forget" and len(caches) > 1:
            caches.remove(found)
            continue
        elif action == "train":
            for model, optimizer in zip(both, optimizers, strict=True):
                batch = prompt(8, seed=3)["input_ids"]
                model.train()(input_ids=batch, labels=batch, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
        if action == "several":
            tokens = tokens.repeat(1, 3)
        if found[0].get_seq_length() + tokens.shape[1] > 60:
            caches.remove(found)
            continue
        one, two = (stepped(model, cache, tokens) for model, cache in zip(both, found, strict=True))
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5, msg=action)
        ids += 1
    record_property("examples", ids)
    assert both[1].report.graphs["replayed"] > 5


def test_training_between_and_changed_models():
    both = pair("llama")
    for step in range(8):
        for each in both:
            if step == 3:
                each.load_state_dict({name: x * 1.1 for name, x in each.state_dict().items()})
            elif step == 4:
                each.lm_head.weight = torch.nn.Parameter(each.lm_head.weight * 0.9)
            elif step == 5:
                each.model.norm.register_forward_hook(lambda module, args, out: out * 0.5)
            elif step == 6:
                each.model.layers[0].self_attn.scaling *= 0.5
            for parameter in each.parameters():
                parameter.data.mul_(1.01)
        assert_alike(both, prompt(6))
    assert both[1].report.graphs["captured"] >= 2


def test_a_hook_that_is_added_while_tokens_are_generated_is_called():
    both, called = pair("llama"), ([], [])
    for each in both:
        generated(each, prompt(6))
    found = []
    for each, calls in zip(both, called, strict=True):

        def hooked(ids, scores, each=each, calls=calls):
            if ids.shape[1] == 12:
                each.model.norm.register_forward_hook(lambda module, args, out: calls.append(1) or out * 0.3)
            return torch.full((len(ids),), False)

        found.append(generated(each, prompt(6), stopping_criteria=StoppingCriteriaList([hooked])))
    assert_same(found[1], found[0])
    assert len(called[0]) == len(called[1]) > 5


def test_a_model_whose_results_depend_on_the_caches_size_runs_as_it_was(monkeypatch):
    both = pair("llama")
    kind = type(both[0].model.layers[0].self_attn)
    inner = kind.forward
    forward = generation.Cache.get_seq_length

    def counts(self, hidden_states, *args, past_key_values=None, **kwargs):
        capacity = past_key_values.get_mask_sizes(1, 0)[0]
        return inner(self, hidden_states * (1 + 0.1 * capacity), *args, past_key_values=past_key_values, **kwargs)

    assert forward is generation.Cache.get_seq_length
    counts.__module__ = kind.__module__
    monkeypatch.setattr(kind, "forward", counts)
    for each in both:
        for layer in each.model.layers:
            layer.self_attn.__dict__.pop("forward", None)
    for _ in range(2):
        assert_alike(both, prompt(6))
    assert not both[1].report.graphs["captured"]
    refused = both[1].__dict__["_accelerant_patch"].graphs._decoding._refused
    assert set(refused.values()) == {"results in a cache of fixed size differ"}


def test_threads_copies_and_memory(monkeypatch):
    model, other = pair("llama")
    wanted = generated(model, prompt(6)).sequences
    assert torch.equal(generated(other, prompt(6)).sequences, wanted)
    found = []
    in_threads((lambda: found.append(generated(other, prompt(6)).sequences)) for _ in range(3))
    found.append(generated(copy.deepcopy(other), prompt(6)).sequences)
    assert all(torch.equal(each, wanted) for each in found)
    monkeypatch.setattr(graphs, "_free_bytes", lambda: 1 << 10)
    captured = other.report.graphs["captured"]
    assert torch.equal(generated(other, prompt(40)).sequences, generated(model, prompt(40)).sequences)
    assert other.report.graphs["captured"] == captured


def test_tokens_that_another_thread_adds_while_a_cache_leaves_its_room_stay(monkeypatch):
    _, other = pair("llama")
    cache = generated(other, prompt(6)).past_key_values
    layer, clone, added = cache.layers[0], torch.Tensor.clone, []

    def late(x):
        if not added and x is layer.keys:
            added.append(layer.keys)
            layer.keys = torch.cat([layer.keys, layer.keys[:, :, :1]], 2)
        return clone(x)

    monkeypatch.setattr(torch.Tensor, "clone", late)
    other.__dict__["_accelerant_patch"].graphs._decoding.release()
    assert added
    assert layer.keys.shape[2] == added[0].shape[2] + 1


def test_without_memory_for_a_room_the_model_runs_as_it_was(monkeypatch):
    both = pair("llama")
    run, failures = generation._Room.run, [True]

    def scarce(self, *args):
        if self.checked and failures:
            failures.pop()
            raise torch.OutOfMemoryError("no memory")
        return run(self, *args)

    monkeypatch.setattr(generation._Room, "run", scarce)
    assert_alike(both, prompt(6))
    assert not failures
    assert_alike(both, prompt(6))
    assert both[1].report.graphs["replayed"] > BEFORE


@pytest.mark.sample(40, 16)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(TINY["causal"]))
def test_every_causal_model_generates_what_it_did(name):
    try:
        model = tiny(name, "causal").eval()
        inputs = prompt(6, 2) | {"generation_config": transformers.GenerationConfig(pad_token_id=0)}
        wanted = generated(model, inputs, max_new_tokens=14, return_dict_in_generate=False)
    except Exception as error:
        pytest.skip(f"no tiny {name} that generates ({type(error).__name__}: {error})")
    other = copy.deepcopy(model)
    acl.nn.patch(other, graph=True)
    for _ in range(2):
        assert torch.equal(generated(other, inputs, max_new_tokens=14, return_dict_in_generate=False), wanted)


@pytest.mark.parametrize("kind", ["long", "full", "by layer"])
def test_masks_of_other_shapes_come_between(kind):
    both, found = pair("gemma3" if kind == "by layer" else "llama"), ([], [])
    for model, logits in zip(both, found, strict=True):
        cache, given = DynamicCache(config=model.config), prompt(6, 2)
        mask = given["attention_mask"].bool()
        with torch.no_grad():
            model(**given, past_key_values=cache)
            for step in range(BEFORE + 6):
                mask = torch.cat((mask, mask[:, -1:]), 1)
                other = {
                    "long": torch.cat((mask, mask.new_ones(2, 40)), 1), "full": mask[:, None, None],
                    "by layer": {"full_attention": None, "sliding_attention": None},
                }[kind]  # fmt: skip
                given = mask if step < BEFORE + 3 and step != 2 else other
                token = torch.full((2, 1), 7 + step)
                logits.append(model(input_ids=token, attention_mask=given, past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_decoding_can_be_pickled():
    decoding = generation.Decoding(len, acl.nn.PatchReport("a model"))
    assert pickle.loads(pickle.dumps(decoding))._forward is len


def test_outputs_are_those_of_the_class():
    both, tokens = pair("llama"), torch.tensor([[5]])
    found = [[], []]
    for model, outputs in zip(both, found, strict=True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(**prompt(6), past_key_values=cache)
            outputs += [model(input_ids=tokens, past_key_values=cache) for _ in range(BEFORE + 3)]
        assert all(each.past_key_values is cache for each in outputs)
    assert both[1].report.graphs["replayed"] == 3
    for one, two in zip(*found, strict=True):
        assert (type(one), [*one], sorted(vars(one))) == (type(two), [*two], sorted(vars(two)))
        torch.testing.assert_close(one.logits, two.logits, rtol=1e-4, atol=1e-5)
        assert one.to_tuple()[0] is one["logits"] is one.logits is one[0]
        assert (two.loss, two.hidden_states) == (None, None)
        assert copy.copy(two).keys() == two.keys()
