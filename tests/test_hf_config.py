"""config.json of a target: what it may say, under old and new keys, and what is refused."""

import math

import pytest
import torch
from hf_folders import CONFIG, command, convert, make, refusal, tiny_tensors

from model import RopeScaling
from talon.checkpoint import read_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MSCALES = (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_read_under_either_key(tmp_path, key):
    scaling = {key if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    config = convert(make(tmp_path, {"rope_theta": 500000, "rope_scaling": scaling})).config
    assert config["rope_theta"] == 500000.0
    assert RopeScaling(**config["rope_scaling"]) == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({}, {"attention_factor": 1 + 0.1 * math.log(4)}),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, {"attention_factor": MSCALES}),
        ({"mscale": 1.0, "mscale_all_dim": 0}, {"attention_factor": 1 + 0.1 * math.log(4)}),
        ({"attention_factor": 0.5, "mscale": 3.0}, {"attention_factor": 0.5}),
        ({"beta_fast": 16, "beta_slow": 2}, {"high_freq_factor": 16.0, "low_freq_factor": 2.0}),
        ({"truncate": False}, {"truncate": False}),
    ],
    ids=str,
)
def test_yarn_is_read_as_transformers_reads_it(tmp_path, changes, wanted):
    old = convert(make(tmp_path / "old", {"rope_theta": 1e6, "rope_scaling": YARN | changes}))
    parameters = YARN | changes | {"rope_theta": 1e6}
    new = convert(make(tmp_path / "new", {"rope_parameters": parameters}))
    scaling = old.config["rope_scaling"]
    assert new.config == old.config and {key: scaling[key] for key in wanted} == wanted


@pytest.mark.parametrize("stated, wanted", [(64, 128), (200, 200)])
def test_a_context_stated_before_yarn_was_switched_on_grows(tmp_path, stated, wanted):
    path = make(tmp_path, {"rope_scaling": YARN, "max_position_embeddings": stated})
    assert convert(path).config["max_seq_length"] == wanted


def test_an_integer_factor_and_linear_scaling_are_fine(tmp_path):
    config = convert(make(tmp_path, {"rope_scaling": {"type": "linear", "factor": 4}})).config
    assert (config["rope_scaling"]["kind"], config["rope_scaling"]["factor"]) == ("linear", 4.0)


@pytest.mark.parametrize(
    "scaling, word",
    [
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        (YARN | {"factor": None}, "factor"),
        (YARN | {"beta_fast": 1}, "beta_fast"),
        (YARN | {"original_max_position_embeddings": None}, "original_max_position_embeddings"),
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
        ({"model_type": "qwen3_moe"}, ["model_type", "qwen3_moe", "qwen3"]),
        ({"model_type": "qwen3_next"}, ["model_type", "qwen3_next"]),
        ({"model_type": "mistral3"}, ["model_type", "mistral3"]),
        ({"model_type": "qwen3"}, ["LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"use_sliding_window": False, "sliding_window": 16}, ["sliding_window", "16"]),
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, ["gemma"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequence"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"architectures": None, "model_type": None}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"sliding_window": 16}, ["sliding_window", "16"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 3}, ["layer_types"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq"]),
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
        assert command("--checkpoint_dir", given) == 0
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
