"""Qwen2, Qwen3, Mistral and yarn: the numbers of Hugging Face, drafting, training, quantising."""

import json
from functools import cache

import pytest
import torch
from hf_folders import hollow
from safetensors.torch import load_file
from tiny import GOLDEN, SAMPLINGS, TREES, converted, decode, eager, random_head, random_model
from tiny_training import tiny_target, train, write_lines, write_target

from convert_hf_checkpoint import convert, plan_target
from model import RopeScaling
from quantize import quantize_checkpoint
from talon.checking import full_logits
from talon.checkpoint import read_checkpoint
from talon.decoder import Decoder
from talon.formats.hf_folder import HFFolder
from talon.loading import load_head, load_target, open_files
from talon.text import load
from talon.training.batched import BatchedDecoder
from talon.trees import chain, dynamic_tree, parse_tree

TARGETS = sorted(path.name for path in (GOLDEN / "targets").iterdir() if path.is_dir())
YARN = RopeScaling("yarn", 4.0, 2.0, 16.0, 32, attention_factor=1.14)
QWEN3 = {"qk_norm": True, "head_dim": 24, "rope_theta": 1e6}
KINDS = {
    "qwen2": {"qkv_bias": True},
    "qwen3": QWEN3,
    "qwen3 yarn": QWEN3 | {"rope_scaling": YARN, "max_seq_length": 128},
}
CPU = torch.device("cpu")


# ---------------------------------------------------------------- the numbers of Hugging Face


@pytest.fixture(scope="module", params=TARGETS)
def golden(request, tmp_path_factory):
    directory = GOLDEN / "targets" / request.param
    out = tmp_path_factory.getbasetemp() / "targets" / request.param / "talon.safetensors"
    prompts = json.loads((directory / "golden.json").read_text())["prompts"]
    logits = load_file(directory / "golden.safetensors")
    return converted(directory / "model", out), prompts, logits


def test_logits_and_ids_are_those_of_hugging_face(golden):
    path, prompts, logits = golden
    engine = load(path, compile=False)
    for name, prompt in prompts.items():
        wanted = logits[f"{name}.logits"]
        found = full_logits(engine.decoder.model, prompt["prompt_ids"])
        assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()
        if prompt["min_top1_top2_gap"] >= 0.001:
            ids = decode(engine.decoder, prompt["prompt_ids"], 32).tokens
            assert ids == prompt["greedy_ids"]


@pytest.mark.parametrize("mode", ["int8", "int8-dynamic", "int4"])
def test_a_quantised_target_drafts_what_it_says_plainly(golden, mode, tmp_path):
    path, prompts, logits = golden
    out = quantize_checkpoint(path, mode, 32, tmp_path / "quantised.safetensors")
    engine = load(out, compile=False)
    kept = {name for name in read_checkpoint(out).specs if name.endswith("attention.q_norm.weight")}
    assert bool(kept) == engine.decoder.model.config.qk_norm
    if mode != "int4":  # too few bits for random weights
        found = full_logits(engine.decoder.model, prompts["p100"]["prompt_ids"])
        assert (found - logits["p100.logits"]).norm() < 0.5 * found.norm()
    head = random_head(engine.decoder.model, "eagle3")
    drafting = eager(engine.decoder.model, head, parse_tree(TREES[3]), 200)
    ids = prompts["p40"]["prompt_ids"]
    assert decode(drafting, ids, 32).tokens == decode(engine.decoder, ids, 32).tokens


RANDOM = {
    "llama": {"attention_bias": True},
    "mistral": {"head_dim": 24, "sliding_window": None},
    "qwen2": {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
}
SCALINGS = {
    "none": {},
    "yarn": {"factor": 3.0, "beta_fast": 8.0, "truncate": False},
    "yarn mscale": {"factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn factor": {"factor": 4.0, "attention_factor": 1.3},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", RANDOM)
def test_a_random_model_has_the_logits_of_transformers(kind, scaling, tmp_path):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_theta": 5e4, "rope_type": "default"}
    if SCALINGS[scaling]:
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": 32}
    sizes = {
        "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rope_parameters": rope | SCALINGS[scaling], "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(sizes | RANDOM[kind]))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    convert(tmp_path)
    ids = torch.randint(99, (100,)).tolist()
    mine = load(tmp_path / "talon.safetensors", compile=False)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = full_logits(mine.decoder.model, ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


SHARED = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "use_cache": True,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "num_key_value_heads": 8,
}  # fmt: skip
QWEN2 = SHARED | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN = SHARED | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False,
    "attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_scaling": None, "sliding_window": None, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {
    "Qwen2.5-7B-Instruct": QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "max_window_layers": 28,
        "sliding_window": 131072,
    },
    "QwQ-32B": QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
        "max_position_embeddings": 40960, "max_window_layers": 64, "sliding_window": 32768,
    },
    "Qwen3-4B": QWEN | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
        "max_window_layers": 36, "tie_word_embeddings": True,
    },
    "Qwen3-32B": QWEN | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "max_window_layers": 64,
    },
    "Mistral-Nemo-Instruct-2407": SHARED | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "rms_norm_eps": 1e-05,
        "sliding_window": None, "vocab_size": 131072,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_of_a_published_target_is_used(name, tmp_path):
    config = PUBLISHED[name] | {"num_hidden_layers": 2}  # two layers of many
    dim, inner, vocab = (config[f"{x}_size"] for x in ("hidden", "intermediate", "vocab"))
    size = config.get("head_dim", dim // config["num_attention_heads"])
    rows = {"q": config["num_attention_heads"] * size}
    rows |= dict.fromkeys("kv", config["num_key_value_heads"] * size)
    shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (vocab, dim)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (n, dim) for x, n in rows.items()}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (dim, rows["q"])}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (inner, dim) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (dim, inner)}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{layer}.{norm}.weight": (dim,) for norm in norms}
        if config["model_type"] == "qwen2":
            shapes |= {f"{layer}.self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (size,) for x in "qk"}
    conversion = plan_target(HFFolder(hollow(tmp_path / "whole", config, shapes)))
    conversion.check()
    assert {part for output in conversion.outputs for part in output.parts} == shapes.keys()
    own = [
        n
        for n in shapes
        if n.endswith(("layers.1.self_attn.q_proj.bias", "1.self_attn.q_norm.weight"))
    ]
    for name in own:  # a type's own tensors may not be missing
        less = {key: shape for key, shape in shapes.items() if key != name}
        with pytest.raises(ValueError, match="lacks"):
            plan_target(HFFolder(hollow(tmp_path / name, config, less))).check()
    if "use_sliding_window" in config:
        window = config | {"use_sliding_window": True}
        with pytest.raises(ValueError, match="use_sliding_window is True"):
            plan_target(HFFolder(hollow(tmp_path / "window", window, shapes)))


# ---------------------------------------------------------------- drafting

MODELS = {kind: random_model(**changes) for kind, changes in KINDS.items()}


@cache
def plain_ids(kind: str, sampling: str) -> list[int]:
    return decode(eager(MODELS[kind], context=60), [3, 17, 99, 4], 99, SAMPLINGS[sampling]).tokens


@pytest.mark.parametrize("tree", TREES[1:])
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_ids_equal_plain_ids(kind, family, tree):
    model = MODELS[kind]  # and a head with what the target has
    head = random_head(model, family, **KINDS[kind])
    decoder = eager(model, head, parse_tree(tree), 60)
    for name, sampling in SAMPLINGS.items():
        drafted = decode(decoder, [3, 17, 99, 4], 99, sampling).tokens
        assert drafted == plain_ids(kind, name) and len(drafted) == 56


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_drafted_ids_equal_compiled_plain_ids(kind):
    model = MODELS[kind]
    head = random_head(model, "eagle3", **KINDS[kind])
    tree = dynamic_tree(nodes=26, levels=4, top_k=6)
    plain, drafting = Decoder(model, 60), Decoder(model, 60, head, tree)
    for sampling in SAMPLINGS.values():
        wanted = decode(plain, [3, 17, 99, 4], 50, sampling).tokens
        assert decode(drafting, [3, 17, 99, 4], 50, sampling).tokens == wanted


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("kind", KINDS)
def test_texts_side_by_side_are_those_of_the_decoder(kind):
    torch.manual_seed(0)
    model, ids = MODELS[kind], torch.randint(128, (3, 20)).tolist()
    batched = BatchedDecoder(model, 3, 20)
    for position in range(20):
        logits = batched.forward([row[position] for row in ids], [position] * 3)
    for row, text in zip(logits, ids, strict=True):
        torch.testing.assert_close(row, full_logits(model, text)[-1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_a_trained_head_of_a_qwen3_is_better_than_chance_and_lossless(family, tmp_path):
    model = tiny_target(qk_norm=True, head_dim=12)
    target = write_target(tmp_path / "target", model)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(30):  # texts that the target itself goes on with
        ids = torch.randint(2, 200, (4,), generator=generator).tolist()
        ids += decode(Decoder(model, 64, compile=False), ids, 40).tokens
        rows.append({"ids": ids, "spans": [[4, len(ids)]]})
    data = write_lines(tmp_path / "rows.jsonl", rows)
    path = train(target, data, tmp_path / "run", "--head", family, "--epochs", 12, "--lr", 3e-3)
    files = open_files(target, path)
    model = load_target(files, CPU, torch.float32)
    head = load_head(files, model, CPU, torch.float32)
    plain, drafting = Decoder(model, 100, compile=False), eager(model, head, chain(3))
    right = drafted = 0
    for row in rows[:10]:
        texts = [decode(decoder, row["ids"][:4], 40) for decoder in (plain, drafting)]
        assert texts[0].tokens == texts[1].tokens
        right += texts[1].stats.emitted - texts[1].stats.rounds
        drafted += texts[1].stats.rounds
    assert right / drafted > 0.1  # tokens a round beyond one; by chance 1 in 200
