"""Conversion of targets: what published directories hold, and how damaged or hostile ones end."""

import base64
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from convert_hf_checkpoint import main
from talon.checkpoint import Checkpoint, read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_tensors(config: dict, biases: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Random weights in Hugging Face names, fp32; `biases` are the linears that get one."""
    c, rand = config, torch.Generator().manual_seed(1)
    heads = c["num_attention_heads"]
    kv = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    dim, inner = c["hidden_size"], c["intermediate_size"]
    linears = {
        "self_attn.q_proj": (heads * head_dim, dim),
        "self_attn.k_proj": (kv * head_dim, dim),
        "self_attn.v_proj": (kv * head_dim, dim),
        "self_attn.o_proj": (dim, heads * head_dim),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], dim), "model.norm.weight": (dim,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if name.split(".")[1] in biases:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        shapes[f"{layer}.input_layernorm.weight"] = (dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (dim,)
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], dim)
    return {name: torch.randn(shape, generator=rand) for name, shape in shapes.items()}


def make(path: Path, changes=None, tensors=None, drop=(), biases=(), save=True) -> Path:
    """A directory with config.json (CONFIG with `changes`, without `drop`) and one weight file."""
    path.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in (CONFIG | (changes or {})).items() if k not in drop}
    (path / "config.json").write_text(json.dumps(config))
    if save:
        sizes = CONFIG | config
        tensors = tiny_tensors(sizes, biases) if tensors is None else tensors
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def shard(path: Path, tensors: dict[str, Tensor], parts: int = 3, pickled: bool = False) -> None:
    """The tensors dealt out over `parts` files, so that q, k and v lie in different ones."""
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    weight_map = {}
    for i in range(parts):
        name = f"{stem}-{i + 1:05}-of-{parts:05}.{suffix}"
        part = dict(list(tensors.items())[i::parts])
        torch.save(part, path / name) if pickled else save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def convert(path: Path, *flags: str) -> Checkpoint:
    assert main(["--checkpoint_dir", str(path), "--out", str(path / "talon.out"), *flags]) == 0
    return read_checkpoint(path / "talon.out")


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.tensors()}


def refusal(capsys, path: Path, *words: str, flags: tuple[str, ...] = ()) -> str:
    """Conversion ends with code 2 and one line that holds every word, and leaves no new file."""
    capsys.readouterr()
    before = sorted(path.rglob("*")) if path.is_dir() else None
    assert main(["--checkpoint_dir", str(path), *flags]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("error: "), captured.err
    line = lines[0].replace(str(path), "DIR")  # a word must not be found in the test's own name
    for word in words:
        assert str(word) in line, line
    assert before == (sorted(path.rglob("*")) if path.is_dir() else None)
    return lines[0]


# ---------------------------------------------------------------- what a conversion is


def test_names_fusion_and_values_follow_the_source(tmp_path):
    source = tiny_tensors(CONFIG)
    found = tensors_of(convert(make(tmp_path, tensors=source)))
    expected = {
        "tok_embeddings.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "output.weight": source["lm_head.weight"],
    }
    for i in range(2):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        qkv = [source[f"{attention}{x}_proj.weight"] for x in "qkv"]
        expected[ours + "attention.wqkv.weight"] = torch.cat(qkv)
        expected[ours + "attention.wo.weight"] = source[attention + "o_proj.weight"]
        gate_up = [source[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]
        expected[ours + "feed_forward.w13.weight"] = torch.cat(gate_up)
        expected[ours + "feed_forward.w2.weight"] = source[mlp + "down_proj.weight"]
        expected[ours + "attention_norm.weight"] = source[theirs + "input_layernorm.weight"]
        expected[ours + "ffn_norm.weight"] = source[theirs + "post_attention_layernorm.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_default_output_summary_and_notes(tmp_path, capsys):
    make(tmp_path)
    assert main(["--checkpoint_dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert str(tmp_path / "talon.safetensors") in captured.out and "F32" in captured.out
    assert all(line.startswith("note: ") for line in captured.err.splitlines())
    assert read_checkpoint(tmp_path / "talon.safetensors").kind == "target"


def test_converting_twice_gives_identical_bytes(tmp_path):
    make(tmp_path)
    first = convert(tmp_path).path.read_bytes()
    assert convert(tmp_path).path.read_bytes() == first
    assert str(tmp_path).encode() not in first  # no machine's paths


@pytest.mark.parametrize("layout", ["bin", "shards", "bin shards", "old bin", "both"])
def test_every_weight_layout_gives_the_same_tensors(tmp_path, layout):
    tensors = tiny_tensors(CONFIG)
    expected = tensors_of(convert(make(tmp_path / "plain", tensors=tensors)))
    path = make(tmp_path / "other", save=layout == "both", tensors=tensors)
    if "shards" in layout:
        shard(path, tensors, pickled="bin" in layout)
    elif layout == "both":  # safetensors wins
        torch.save({name: t + 1 for name, t in tensors.items()}, path / "pytorch_model.bin")
    else:
        new = layout != "old bin"
        torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    found = tensors_of(convert(path))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("flag", ["fp32", "fp16", "bf16"])
def test_dtype_is_kept_or_as_asked(tmp_path, flag):
    wanted = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[flag]
    tensors = {name: t.to(torch.bfloat16) for name, t in tiny_tensors(CONFIG).items()}
    make(tmp_path, tensors=tensors)
    assert {s.dtype for s in convert(tmp_path).specs.values()} == {torch.bfloat16}
    found = convert(tmp_path, "--dtype", flag)
    assert {spec.dtype for spec in found.specs.values()} == {wanted}
    assert torch.equal(found.tensor("norm.weight"), tensors["model.norm.weight"].to(wanted))


def test_float16_that_would_overflow_is_refused(tmp_path, capsys):
    tensors = tiny_tensors(CONFIG)
    tensors["model.norm.weight"][0] = 1e5
    path = make(tmp_path, tensors=tensors)
    refusal(capsys, path, "model.norm.weight", "bf16", flags=("--dtype", "fp16"))


def test_mixed_dtypes_in_a_fused_tensor_need_a_choice(tmp_path, capsys):
    tensors = tiny_tensors(CONFIG)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].half()
    refusal(capsys, make(tmp_path, tensors=tensors), name, "--dtype")
    convert(tmp_path, "--dtype", "fp32")


@pytest.mark.parametrize("name", sorted(p.name for p in (GOLDEN / "llama_parity").iterdir()))
def test_golden_targets_convert_with_their_configuration(tmp_path, name):
    source = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_parity" / name / "model", source)
    opened = convert(source)
    golden = json.loads((GOLDEN / "llama_parity" / name / "golden.json").read_text())
    eos = golden["eos_token_id"]
    assert opened.config["eos_ids"] == (eos if isinstance(eos, list) else [eos])
    assert opened.config["bos_id"] == 1
    theta = {"gqa": 500000.0, "hea": 50000.0, "tie": 10000.0}[name[:3]]
    assert opened.config["rope_theta"] == theta
    assert opened.config["tied"] == ("output.weight" not in opened.specs) == name.startswith("tied")
    assert opened.config["mlp_bias"] == name.startswith("headdim")


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_read_under_either_key(tmp_path, key):
    scaling = {key if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    config = convert(make(tmp_path, {"rope_theta": 500000, "rope_scaling": scaling})).config
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 32,
    }


def test_an_integer_factor_and_linear_scaling_are_fine(tmp_path):
    config = convert(make(tmp_path, {"rope_scaling": {"type": "linear", "factor": 4}})).config
    assert (config["rope_scaling"]["kind"], config["rope_scaling"]["factor"]) == ("linear", 4.0)


@pytest.mark.parametrize(
    "scaling, word",
    [
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "yarn", "factor": 2.0}, "yarn"),
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": "foo"}, "foo"),
        ({"factor": 2.0}, "None"),
        ({"type": "linear", "rope_type": "llama3", "factor": 2.0}, "disagree"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "linear", "factor": 0.5}, "factor"),
        ({"type": "linear", "factor": True}, "factor"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
        ("linear", "rope_scaling"),
    ],
)
def test_other_rope_scaling_is_refused_by_name(tmp_path, capsys, scaling, word):
    refusal(capsys, make(tmp_path, {"rope_scaling": scaling}), word)


def test_old_and_new_rope_keys_give_identical_models(tmp_path):
    old = make(tmp_path / "old" / "m", {"rope_theta": 500000.0, "rope_scaling": LLAMA3})
    parameters = LLAMA3 | {"rope_theta": 500000.0}
    new = make(tmp_path / "new" / "m", {"rope_parameters": parameters, "dtype": "float32"})
    both = make(
        tmp_path / "both" / "m",
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rope_parameters": parameters},
    )
    files = [convert(path).path.read_bytes() for path in (old, new, both)]
    assert files[0] == files[1] == files[2]


def test_rope_base_defaults_and_conflicts(tmp_path, capsys):
    default = {"rope_type": "default", "rope_theta": 500000.0}
    assert convert(make(tmp_path)).config["rope_theta"] == 10000.0
    assert convert(make(tmp_path, {"rope_parameters": default})).config["rope_theta"] == 500000.0
    changes = {"rope_parameters": default, "rope_theta": 10000.0}
    refusal(capsys, make(tmp_path, changes), "10000.0", "500000.0", "rope_parameters")
    changes = {"rope_parameters": default, "rope_scaling": LLAMA3}
    refusal(capsys, make(tmp_path, changes), "rope scaling", "rope_parameters")
    for theta in (0, -1, "1e4", float("nan"), 10**400, True):
        refusal(capsys, make(tmp_path, {"rope_theta": theta}), "rope_theta")


@pytest.mark.parametrize("heads, kv, head_dim", [(4, 4, 4), (4, 1, 20), (6, 2, 4), (8, 2, 16)])
def test_grouped_heads_and_explicit_head_dim(tmp_path, heads, kv, head_dim):
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim}
    opened = convert(make(tmp_path, changes))
    assert opened.specs["layers.0.attention.wqkv.weight"].shape == ((heads + 2 * kv) * head_dim, 16)
    assert (opened.config["n_kv_head"], opened.config["head_dim"]) == (kv, head_dim)


def test_missing_kv_heads_means_as_many_as_heads_and_null_head_dim_is_derived(tmp_path):
    changes = {"num_key_value_heads": None, "head_dim": None}
    config = convert(make(tmp_path, changes)).config
    assert (config["n_kv_head"], config["head_dim"]) == (4, 4)


def test_max_sequence_length_is_the_old_name_of_the_context(tmp_path):
    path = make(tmp_path, {"max_sequence_length": 99}, drop=("max_position_embeddings",))
    assert convert(path).config["max_seq_length"] == 99


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "qwen3"}, ["model_type", "qwen3"]),
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, ["gemma"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequence"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"architectures": None, "model_type": None}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"sliding_window": 16}, ["sliding_window", "16"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 3}, ["layer_types"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"num_local_experts": 8}, ["num_local_experts"]),
        ({"hidden_size": 32}, ["[32, 16]", "[32, 32]"]),
        ({"vocab_size": 33}, ["embed_tokens", "[32, 16]", "[33, 16]"]),
        ({"num_hidden_layers": 3}, ["num_hidden_layers", "3", "2"]),
        ({"num_hidden_layers": 1}, ["num_hidden_layers", "1", "2"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "3"]),
        ({"num_key_value_heads": 1}, ["k_proj"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ["hidden_size 16", "3"]),
        ({"num_attention_heads": 0}, ["num_attention_heads"]),
        ({"num_attention_heads": "4"}, ["num_attention_heads"]),
        ({"hidden_size": -16}, ["hidden_size"]),
        ({"hidden_size": 16.0}, ["hidden_size"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"head_dim": 3}, ["head_dim"]),
        ({"head_dim": True}, ["head_dim"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings"]),
        ({"bos_token_id": -1}, ["bos_token_id"]),
        ({"eos_token_id": 32}, ["eos_token_id", "31"]),
        ({"eos_token_id": [1, "2"]}, ["eos_token_id"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings"]),
    ],
)
def test_unsupported_and_contradictory_configurations_are_refused(tmp_path, capsys, changes, words):
    path = make(tmp_path, changes, tensors=tiny_tensors(CONFIG))
    refusal(capsys, path, *words)


def test_harmless_keys_change_nothing(tmp_path):
    plain = convert(make(tmp_path / "a" / "m")).path.read_bytes()
    changes = {"pretraining_tp": 2, "sliding_window": None, "use_cache": False, "logit_scale": 1.0}
    assert convert(make(tmp_path / "b" / "m", changes)).path.read_bytes() == plain


def test_mistral_needs_its_window_switched_off(tmp_path, capsys):
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    opened = convert(make(tmp_path / "null", mistral | {"sliding_window": None}))
    assert opened.source["architecture"] == "MistralForCausalLM"
    refusal(capsys, make(tmp_path / "set", mistral | {"sliding_window": 4096}), "sliding_window")
    refusal(capsys, make(tmp_path / "absent", mistral), "sliding_window", "4096")


@pytest.mark.parametrize("name", ["x", "Llama-2-7b-hf", "llama-3-8b", "my model (v1)"])
def test_the_folder_name_means_nothing(tmp_path, name):
    plain = convert(make(tmp_path / "plain"))
    opened = convert(make(tmp_path / name))
    assert opened.config == plain.config
    assert opened.source["directory"] == name
    assert all(torch.equal(t, plain.tensor(n)) for n, t in opened.tensors())


def test_trailing_slash_link_and_dot_are_the_same_folder(tmp_path, monkeypatch, capsys):
    path = make(tmp_path / "model")
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(path)
    for given in (f"{path}/", str(tmp_path / "link"), "."):
        assert main(["--checkpoint_dir", given]) == 0
        assert read_checkpoint(path / "talon.safetensors").config["dim"] == 16
        (path / "talon.safetensors").unlink()
    refusal(capsys, path / "model.safetensors", "is a file")
    refusal(capsys, tmp_path / "nowhere", "does not exist")
    (path / "config.json").unlink()
    refusal(capsys, path, "config.json")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_damaged_config_is_one_line(tmp_path, capsys, content):
    make(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    refusal(capsys, tmp_path, "config.json")


# ---------------------------------------------------------------- embeddings and biases


def test_tied_models_need_no_output_matrix(tmp_path, capsys):
    tied = {"tie_word_embeddings": True}
    tensors = tiny_tensors(CONFIG | tied)
    opened = convert(make(tmp_path, tied, tensors))
    assert opened.config["tied"] and "output.weight" not in opened.specs
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    capsys.readouterr()
    assert "output.weight" not in convert(make(tmp_path, tied, tensors)).specs
    assert "lm_head" not in capsys.readouterr().err
    tensors["lm_head.weight"] += 1
    assert "output.weight" not in convert(make(tmp_path, tied, tensors)).specs
    assert "lm_head" in capsys.readouterr().err


@pytest.mark.parametrize("drop", [(), ("tie_word_embeddings",)])
def test_an_untied_model_without_output_matrix_is_refused(tmp_path, capsys, drop):
    tensors = tiny_tensors(CONFIG | {"tie_word_embeddings": True})
    refusal(capsys, make(tmp_path, tensors=tensors, drop=drop), "lm_head.weight", "tie_word")


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    "changes, biases, expected",
    [
        ({"attention_bias": True}, ATTENTION, (True, True, False)),
        ({"mlp_bias": True}, MLP, (False, False, True)),
        ({}, ATTENTION[:3], (True, False, False)),
        ({"attention_bias": True}, ATTENTION[:3], (True, False, False)),
        ({"attention_bias": False, "mlp_bias": False}, (), (False, False, False)),
    ],
)
def test_biases_are_carried_over(tmp_path, changes, biases, expected):
    opened = convert(make(tmp_path, changes, biases=biases))
    flags = tuple(opened.config[key] for key in ("qkv_bias", "o_bias", "mlp_bias"))
    assert flags == expected
    source = load_file(tmp_path / "model.safetensors")
    if flags[0]:
        parts = [source[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv"]
        assert torch.equal(opened.tensor("layers.1.attention.wqkv.bias"), torch.cat(parts))
    if flags[2]:
        parts = [source[f"model.layers.1.mlp.{x}_proj.bias"] for x in ("gate", "up")]
        assert torch.equal(opened.tensor("layers.1.feed_forward.w13.bias"), torch.cat(parts))
        down = source["model.layers.1.mlp.down_proj.bias"]
        assert torch.equal(opened.tensor("layers.1.feed_forward.w2.bias"), down)


@pytest.mark.parametrize(
    "changes, biases, word",
    [
        ({"attention_bias": False}, ATTENTION, "attention_bias"),
        ({"attention_bias": True}, (), "attention_bias"),
        ({"mlp_bias": False}, MLP, "mlp_bias"),
        ({"mlp_bias": True}, (), "mlp_bias"),
        ({}, ("q_proj",), "k_proj.bias"),
    ],
)
def test_bias_flags_and_tensors_must_agree(tmp_path, capsys, changes, biases, word):
    refusal(capsys, make(tmp_path, changes, biases=biases), word)


# ---------------------------------------------------------------- accounting


def test_every_missing_tensor_is_named(tmp_path, capsys):
    complete = tiny_tensors(CONFIG)
    for name in complete:
        rest = {key: tensor for key, tensor in complete.items() if key != name}
        refusal(capsys, make(tmp_path, tensors=rest), name)


@pytest.mark.parametrize(
    "extra",
    ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.extra.weight", "value_head"],
)
def test_an_unknown_tensor_is_an_error(tmp_path, capsys, extra):
    tensors = tiny_tensors(CONFIG) | {extra: torch.zeros(4)}
    refusal(capsys, make(tmp_path, tensors=tensors), extra)


def test_saved_rope_tables_are_ignored(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    convert(make(tmp_path, tensors=tiny_tensors(CONFIG) | {name: torch.zeros(2)}))


def test_quantised_weights_are_refused(tmp_path, capsys):
    tensors = tiny_tensors(CONFIG)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    refusal(capsys, make(tmp_path, tensors=tensors), name, "int8")


def test_an_adapter_is_no_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    refusal(capsys, tmp_path, "adapter")


def test_something_else_is_neither_target_nor_head(tmp_path, capsys):
    refusal(
        capsys,
        make(tmp_path, tensors={"encoder.weight": torch.zeros(2)}),
        "no LLaMA target",
        "fc.weight",
    )


# ---------------------------------------------------------------- files, shards, index


def test_no_weights_names_what_was_looked_for(tmp_path, capsys):
    path = make(tmp_path, save=False)
    (path / "consolidated.00.pth").write_bytes(b"x")
    refusal(capsys, path, "model.safetensors", "pytorch_model.bin", "consolidated.00.pth")


def test_an_incomplete_download_names_the_file(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    (path / "model-00002-of-00003.safetensors").unlink()
    refusal(capsys, path, "model-00002-of-00003.safetensors")
    (path / "model.safetensors").symlink_to(path / "gone")
    refusal(capsys, path, "model.safetensors", "does not exist")


def edit_index(path: Path, change) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_index_and_shards_must_belong_together(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    index = (path / "model.safetensors.index.json").read_text()
    first, second = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name = next(name for name, file in json.loads(index)["weight_map"].items() if file == first)
    edit_index(path, lambda m: m.update({name: second}))
    refusal(capsys, path, name, first, second)
    (path / "model.safetensors.index.json").write_text(index)
    edit_index(path, lambda m: m.pop(name))
    refusal(capsys, path, name, first, "index")
    (path / "model.safetensors.index.json").write_text(index)
    edit_index(path, lambda m: m.update({"model.ghost": second}))
    refusal(capsys, path, "model.ghost", second)


def test_a_tensor_in_two_shards_is_refused(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    file = path / "model-00003-of-00003.safetensors"
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.zeros(32, 16)}, file)
    refusal(capsys, path, "model.embed_tokens.weight", file.name)


def test_an_extra_shard_is_ignored_with_a_note(tmp_path, capsys):
    path = make(tmp_path, save=False)
    shard(path, tiny_tensors(CONFIG))
    save_file({"x": torch.zeros(2)}, path / "model-00009-of-00009.safetensors")
    convert(path)
    assert "model-00009-of-00009.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_one_line(tmp_path, capsys, content):
    path = make(tmp_path, save=False)
    (path / "model.safetensors.index.json").write_text(content)
    refusal(capsys, path, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "entry",
    [
        "../other/model.safetensors",
        "/etc/hostname",
        "sub/../../other/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "a\0b",
        "sub",
        "link.safetensors",
        7,
        None,
    ],
)
def test_an_index_may_not_lead_out_of_the_directory(tmp_path, capsys, entry):
    path = make(tmp_path / "model", save=False)
    make(tmp_path / "other")
    (path / "sub").mkdir()
    (path / "link.safetensors").symlink_to(tmp_path / "other" / "model.safetensors")
    shard(path, tiny_tensors(CONFIG))
    edit_index(path, lambda m: m.update({"model.norm.weight": entry}))
    refusal(capsys, path, repr(entry))


@pytest.mark.parametrize("sharded", [False, True])
def test_links_of_the_hub_cache_are_followed(tmp_path, sharded):
    cache = tmp_path / "models--org--name"
    snapshot = make(cache / "snapshots" / "abc", save=not sharded)
    if sharded:
        shard(snapshot, tiny_tensors(CONFIG))
    (cache / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(cache / "blobs" / f"{i:064x}")
        file.symlink_to(Path("..", "..", "blobs", f"{i:064x}"))
    out = tmp_path / "out.safetensors"
    assert main(["--checkpoint_dir", str(snapshot), "--out", str(out)]) == 0
    assert read_checkpoint(out).config["dim"] == 16


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
ONE = {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}
DAMAGES = {
    "lfs": LFS,
    "zero": b"",
    "huge header": struct.pack("<Q", 2**60) + b"{}",
    "past the end": struct.pack("<Q", len(json.dumps({"x": ONE})))
    + json.dumps({"x": ONE}).encode(),
    "html": b"<html>Sign in to continue</html>",
}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", [*DAMAGES, "half"])
def test_damaged_weight_files_are_named(tmp_path, capsys, name, damage):
    path = make(tmp_path, save=False)
    if damage == "half":
        tensors = tiny_tensors(CONFIG)
        save = torch.save if name.endswith("bin") else save_file
        save(tensors, path / name)
        raw = (path / name).read_bytes()
        (path / name).write_bytes(raw[: len(raw) // 2])
    else:
        (path / name).write_bytes(DAMAGES[damage])
    refusal(capsys, path, name)


class Hostile:
    """An object whose unpickling would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("what", ["value", "whole"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, capsys, new, what):
    path, marker = make(tmp_path / "model", save=False), tmp_path / "marker"
    content = Hostile(marker) if what == "whole" else {"x": Hostile(marker)}
    torch.save(content, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    refusal(capsys, path, "pytorch_model.bin", "refused")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    refusal(capsys, path, "pytorch_model.bin", "refused")
    assert not marker.exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {"state_dict": {}}, {1: torch.zeros(1)}])
def test_a_pickle_that_is_no_flat_state_is_refused(tmp_path, capsys, content):
    path = make(tmp_path, save=False)
    torch.save(content, path / "pytorch_model.bin")
    refusal(capsys, path, "pytorch_model.bin")


# ---------------------------------------------------------------- stop ids and tokenizers


def tokenizer_json(ids: dict[str, int], added: dict[str, int] | None = None) -> str:
    tokens = [{"content": content, "id": i} for content, i in (added or {}).items()]
    return json.dumps({"model": {"type": "BPE", "vocab": ids}, "added_tokens": tokens})


@pytest.mark.parametrize(
    "config_ids, generation_ids, expected",
    [
        ([5, 9], None, [5, 9]),
        (5, [9, 11], [5, 9, 11]),
        (5, 5, [5]),
        (0, None, [0]),
        (None, [0, 7], [0, 7]),
        (None, None, []),
    ],
)
def test_stop_ids_are_the_union_of_both_files(tmp_path, config_ids, generation_ids, expected):
    path = make(tmp_path, {"eos_token_id": config_ids, "bos_token_id": 0})
    if generation_ids is not None:
        content = json.dumps({"eos_token_id": generation_ids})
        (path / "generation_config.json").write_text(content)
    config = convert(path).config
    assert (config["eos_ids"], config["bos_id"]) == (expected, 0)


@pytest.mark.parametrize("form", ["vocab", "added", "decoder", "object", "null"])
def test_the_tokenizers_stop_token_is_resolved_to_its_id(tmp_path, form):
    path = make(tmp_path, {"eos_token_id": 5})
    config: dict = {"eos_token": "<end>"}
    if form == "object":
        config["eos_token"] = {"content": "<end>", "lstrip": False}
    if form == "decoder":
        config["added_tokens_decoder"] = {"9": {"content": "<end>"}}
    if form == "null":
        config["eos_token"] = None
    vocab = {"a": 0} | ({"<end>": 9} if form in ("vocab", "object") else {})
    added = {"<end>": 9} if form in ("added", "null") else None
    (path / "tokenizer.json").write_text(tokenizer_json(vocab, added))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert convert(path).config["eos_ids"] == ([5] if form == "null" else [5, 9])


def test_a_stop_token_without_id_is_noted(tmp_path, capsys):
    path = make(tmp_path)
    (path / "tokenizer.json").write_text(tokenizer_json({"a": 0}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert convert(path).config["eos_ids"] == []
    assert "<end>" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["vocab", "unigram", "added", "decoder"])
def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, capsys, form):
    path = make(tmp_path)
    text = tokenizer_json({"a": 0, "big": 32} if form == "vocab" else {"a": 0})
    if form == "added":
        text = tokenizer_json({"a": 0}, {"big": 32})
    if form == "unigram":
        vocab = [[f"p{i}", 0.0] for i in range(32)] + [["big", 0.0]]
        text = json.dumps({"model": {"type": "Unigram", "vocab": vocab}})
    (path / "tokenizer.json").write_text(text)
    if form == "decoder":
        content = json.dumps({"added_tokens_decoder": {"32": {"content": "big"}}})
        (path / "tokenizer_config.json").write_text(content)
    refusal(capsys, path, "big", "32")


def train_sentencepiece(path: Path, size: int) -> None:
    lines = path.with_suffix(".txt")
    lines.write_text("\n".join(["the cat sat on the mat", "a dog ate the hat"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        model_type="bpe",
        minloglevel=2,
    )
    lines.unlink()
    path.with_suffix(".vocab").unlink()


def test_sentencepiece_and_tiktoken_files_are_told_apart_by_content(tmp_path, capsys):
    path = make(tmp_path / "plain")
    train_sentencepiece(path / "tokenizer.model", 30)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert convert(path).config["eos_ids"] == [2]
    train_sentencepiece(path / "tokenizer.model", 34)
    refusal(capsys, path, "tokenizer", "32")
    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(40))
    (path / "tokenizer.model").write_text(ranks)
    refusal(capsys, path, "39", "32")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [LFS, b"", b"\x00garbage\xff", b'{"model": {"vocab": 3}}', b"\n"]
)
def test_a_damaged_tokenizer_file_is_named(tmp_path, capsys, name, content):
    if name == "tokenizer_config.json" and content.startswith(b"{"):
        content = b'{"added_tokens_decoder": {"x": 1}}'
    (make(tmp_path) / name).write_bytes(content)
    refusal(capsys, tmp_path, name)


def test_tokenizer_files_follow_the_output(tmp_path):
    path, out = make(tmp_path / "model"), tmp_path / "new" / "dir" / "m.safetensors"
    contents = {
        "tokenizer.json": tokenizer_json({"a": 0}),
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
    }
    for name, text in contents.items():
        (path / name).write_text(text)
    for _ in range(2):  # the second time they are already there
        assert main(["--checkpoint_dir", str(path), "--out", str(out)]) == 0
    assert sorted(os.listdir(out.parent)) == sorted([out.name, *contents])
    assert all((out.parent / name).read_text() == text for name, text in contents.items())


def test_another_models_tokenizer_is_not_overwritten(tmp_path, capsys):
    path, out = make(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (path / "tokenizer.json").write_text(tokenizer_json({"a": 0}))
    (path / "chat_template.jinja").write_text("new")
    (out / "chat_template.jinja").write_text("old")
    refusal(capsys, path, "chat_template.jinja", flags=("--out", str(out / "m.safetensors")))
    assert os.listdir(out) == ["chat_template.jinja"]


# ---------------------------------------------------------------- output and command line


def test_a_failure_midway_leaves_no_file_no_tokenizer_and_no_directory(tmp_path, capsys):
    tensors = tiny_tensors(CONFIG)
    tensors["lm_head.weight"][0] = 1e5
    path = make(tmp_path / "model", tensors=tensors)
    (path / "tokenizer.json").write_text(tokenizer_json({"a": 0}))
    out = tmp_path / "new" / "dir" / "m.safetensors"
    refusal(capsys, path, "lm_head", flags=("--out", str(out), "--dtype", "fp16"))
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_the_source_is_never_overwritten(tmp_path, capsys):
    path = make(tmp_path)
    (path / "link").symlink_to(path / "model.safetensors")
    for name in ("model.safetensors", "link", "config.json"):
        refusal(capsys, path, "--out", flags=("--out", str(path / name)))
    refusal(capsys, path, "directory", flags=("--out", str(path)))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--checkpoint_dir"],
        ["--checkpoint_dir", "x", "--export", "y"],
        ["--export", "x"],
        ["--export", "x", "--out", "y", "--dtype", "fp16"],
        ["--checkpoint_dir", "x", "--format", "eagle"],
        ["--checkpoint_dir", "x", "--dtype", "int8"],
        ["--checkpoint_dir", "x", "--check"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_interrupt_is_quiet_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    make(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("talon.formats.hf_folder.Conversion._build", interrupt)
    before = sorted(os.listdir(tmp_path))
    assert main(["--checkpoint_dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "" and sorted(os.listdir(tmp_path)) == before


def test_a_full_disk_leaves_nothing(tmp_path, capsys, monkeypatch):
    make(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("talon.checkpoint._write_bytes", full)
    refusal(capsys, tmp_path, "No space left")


MEASURE = """
import re, sys
sys.path.insert(0, sys.argv[3])
import torch
from convert_hf_checkpoint import main
torch.set_num_threads(1)
(torch.zeros(8) + 1).sum()
def peak():  # ru_maxrss would start from the parent's peak
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

before = peak()
assert main(["--checkpoint_dir", sys.argv[1], "--out", sys.argv[2]]) == 0
print((peak() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pickled", [False, True])
def test_memory_is_one_shard_and_one_tensor(tmp_path, pickled):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    sizes |= {"vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    path = make(tmp_path / "model", sizes, save=False)
    tensors = tiny_tensors(CONFIG | sizes)
    total = sum(t.numel() * 4 for t in tensors.values())
    assert total > 400e6
    shard(path, tensors, parts=4, pickled=pickled)
    del tensors
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", MEASURE, str(path), str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(done.stdout.splitlines()[-1])
    largest_shard = max(file.stat().st_size for file in path.glob("*-of-*"))
    largest = max(spec.nbytes for spec in read_checkpoint(out).specs.values())
    print(f"peak {peak / 1e6:.0f} MB, shard {largest_shard / 1e6:.0f}, tensor {largest / 1e6:.0f}")
    assert peak > 1e7  # the measurement is alive
    assert peak <= 1.3 * largest_shard + largest
