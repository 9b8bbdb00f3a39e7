"""Heads for Qwen as four sources publish them: their config keys, tensor names and shapes, strictly
accounted for; random small ones draft, and a head of another target is refused.

The configurations are those of AngelSlim's heads and its trainer (Tencent/AngelSlim), SpecForge's
configs/, speculators 0.2 and 0.9 (RedHatAI) and the EAGLE-1 head of Qwen2-7B-Instruct.
"""

import json
from pathlib import Path

import pytest
import torch
from hf_folders import hollow
from safetensors.torch import save_file
from tiny import decode, eager, random_model
from tiny_training import write_target

from convert_hf_checkpoint import convert
from talon.checkpoint import read_checkpoint
from talon.formats.head_import import plan_head
from talon.formats.hf_folder import HFFolder
from talon.loading import head_card, load_head, load_target, open_files
from talon.trees import dynamic_tree

QWEN3_8B = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "use_cache": True,
    "rope_scaling": None, "vocab_size": 151936,
}  # fmt: skip
FLAT = {
    "bos_token_id": 151643, "eos_token_id": 151645, "max_window_layers": 36, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_sliding_window": False, "draft_vocab_size": 32000,
}  # fmt: skip
PROPOSALS = {
    "algorithm": "eagle3", "default_proposal_method": "greedy",
    "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy",
                          "speculative_tokens": 5, "verifier_accept_k": 1}],
    "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
}  # fmt: skip
NESTED = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32000, "has_no_defaults_at_init": False, "norm_before_residual": True,
    "speculators_config": PROPOSALS, "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0.dev11", "target_hidden_size": None, "torch_dtype": "float32",
    "transformer_layer_config": QWEN3_8B | {"mlp_bias": False, "pretraining_tp": 1,
                                            "rope_theta": 10000.0},
    "transformers_version": "4.56.1",
}  # fmt: skip
NEWER = NESTED | {
    "architectures": ["Eagle3DraftModel"], "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    "embed_requires_grad": False, "fc_norm": True, "norm_before_fc": False, "norm_output": True,
    "speculators_version": "0.9.0", "transformer_layer_config": QWEN3_8B | {
        "model_type": "qwen3", "layer_types": ["full_attention"], "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 28,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "yarn", "factor": 4.0,
                            "original_max_position_embeddings": 32768},
    },
}  # fmt: skip
EAGLE1 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 1,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
SOURCES = {
    "angelslim": QWEN3_8B | FLAT | {  # Qwen3-4B_eagle3
        "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 80, "hidden_size": 2560,
        "intermediate_size": 9728, "tie_word_embeddings": True, "torch_dtype": "float16",
    },
    "tencent": QWEN3_8B | FLAT | {"architectures": ["Eagle3LlamaForCausalLM"]},
    "specforge": QWEN3_8B | FLAT | {  # qwen3-32b-eagle3.json
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 5120, "head_dim": 80,
        "intermediate_size": 25600, "max_window_layers": 64, "num_attention_heads": 64,
    },
    "speculators": NESTED,
    "speculators qwen3": NEWER,
    "eagle1": EAGLE1,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip


def small(name: str) -> dict:
    """The same configuration for a tiny target of seven layers."""
    config, layer = dict(SOURCES[name]), SOURCES[name].get("transformer_layer_config")
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = 100
    if layer is None:
        return config | SMALL
    if config.get("eagle_aux_hidden_state_layer_ids"):
        config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    return config | {"transformer_layer_config": layer | SMALL}


def shapes_of(name: str, config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a source's heads."""
    layer = config.get("transformer_layer_config", config)
    dim, inner, heads = (
        layer["hidden_size"],
        layer["intermediate_size"],
        layer["num_attention_heads"],
    )
    size, vocab = layer.get("head_dim", dim // heads), layer["vocab_size"]
    kv, eagle1 = layer["num_key_value_heads"], name == "eagle1"
    here = "layers.0" if eagle1 or layer is not config else "midlayer"
    width = dim if eagle1 else 2 * dim
    rows = {"q": heads * size, "k": kv * size, "v": kv * size}
    shapes = {f"{here}.self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()}
    shapes |= {f"{here}.self_attn.o_proj.weight": (dim, heads * size)}
    shapes |= {f"{here}.mlp.{x}_proj.weight": (inner, dim) for x in ("gate", "up")}
    shapes |= {f"{here}.mlp.down_proj.weight": (dim, inner)}
    shapes |= {f"{here}.post_attention_layernorm.weight": (dim,)}
    if eagle1:
        shapes |= {f"{here}.self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        return shapes | {
            "fc.weight": (dim, 2 * dim), "fc.bias": (dim,), "embed_tokens.weight": (vocab, dim)
        }  # fmt: skip
    draft = config["draft_vocab_size"]
    shapes |= {f"{here}.{norm}.weight": (dim,) for norm in ("hidden_norm", "input_layernorm")}
    shapes |= {"fc.weight": (dim, 3 * dim), "norm.weight": (dim,), "lm_head.weight": (draft, dim)}
    shapes |= {"d2t": (draft,), "t2d": (vocab,)}
    if name in ("tencent", "speculators", "speculators qwen3"):
        shapes["embed_tokens.weight"] = (vocab, dim)
    if layer["model_type"] == "qwen3":
        shapes |= {f"{here}.self_attn.{x}_norm.weight": (size,) for x in "qk"}
        shapes |= {f"fc_norm.{i}.weight": (dim,) for i in range(3)}
    return shapes


@pytest.mark.parametrize("name", SOURCES)
def test_every_tensor_of_a_published_head_is_used(name, tmp_path):
    shapes = shapes_of(name, SOURCES[name])
    conversion = plan_head(HFFolder(hollow(tmp_path / "head", SOURCES[name], shapes)))
    wanted = {part for output in conversion.outputs for part in output.parts}
    assert wanted | {"t2d"} == shapes.keys() | {"t2d"}
    c = conversion.config
    assert c.qk_norm == (name == "speculators qwen3") and c.qkv_bias == (name == "eagle1")
    assert c.norm_before_residual == name.startswith("speculators")
    assert c.own_embedding == ("embed_tokens.weight" in shapes)
    extra = shapes | {"layers.1.mlp.up_proj.weight": (8, 8)}
    with pytest.raises(ValueError, match="several layers"):
        plan_head(HFFolder(hollow(tmp_path / "more", SOURCES[name], extra)))


def write_head(path: Path, name: str) -> Path:
    """A small random head of a source, converted."""
    config = small(name)
    torch.manual_seed(1)
    tensors = {n: torch.randn(shape) * 0.2 for n, shape in shapes_of(name, config).items()}
    if "d2t" in tensors:
        ids = torch.randperm(300)[:100].sort().values
        tensors |= {"d2t": ids - torch.arange(100), "t2d": torch.isin(torch.arange(300), ids)}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if name == "angelslim":  # pytorch_model.bin, as its older ones
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    convert(path, path / "head.safetensors")
    return path / "head.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    changes = {"qk_norm": True, "n_layer": 7, "vocab_size": 300, "max_seq_length": 256}
    return write_target(tmp_path_factory.mktemp("qwen3"), random_model(**changes))


@pytest.mark.parametrize("name", SOURCES)
def test_a_small_head_of_every_source_drafts_and_changes_nothing(name, target, tmp_path):
    files = open_files(target, write_head(tmp_path / "head", name))
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    tree = dynamic_tree(nodes=12, levels=3, top_k=4)
    texts = [
        decode(decoder, [3, 5, 8], 24).tokens
        for decoder in (eager(model), eager(model, head, tree))
    ]
    assert texts[0] == texts[1]
    card = head_card(head.config)
    if name == "speculators qwen3":
        assert "qk_norm" in card and "yarn x 4" in card and "fc_norm" in card


def test_a_head_with_norms_and_yarn_comes_back_from_an_export(tmp_path, target):
    from talon.formats.head_export import export_head

    path = write_head(tmp_path / "head", "speculators qwen3")
    with pytest.raises(ValueError, match="qk_norm.*--format speculators"):
        export_head(path, tmp_path / "flat")
    export_head(path, tmp_path / "out", "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "qwen3" and layer["rope_scaling"]["rope_type"] == "yarn"
    convert(tmp_path / "out", tmp_path / "again.safetensors")
    first, second = read_checkpoint(path), read_checkpoint(tmp_path / "again.safetensors")
    free = {"rope_source": ""}
    assert first.config | free == second.config | free
    assert all(torch.equal(tensor, second.tensor(name)) for name, tensor in first.tensors())


@pytest.mark.parametrize(
    "changes, numbers",
    [({"vocab_size": 304}, ("300", "304")), ({"dim": 32, "head_dim": 8}, ("64", "32"))],
)
def test_a_head_of_another_target_is_refused_with_both_numbers(changes, numbers, tmp_path):
    fields = {"qk_norm": True, "n_layer": 7, "vocab_size": 300, "max_seq_length": 256}
    target = write_target(tmp_path / "target", random_model(**(fields | changes)))
    for name in ("angelslim", "eagle1"):
        with pytest.raises(ValueError) as refused:
            open_files(target, write_head(tmp_path / name, name))
        assert all(number in str(refused.value) for number in numbers)
