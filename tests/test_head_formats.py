"""Heads in every published layout become one file; what would silently accept less is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_folders import command
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_draft import DraftConfig
from talon.checkpoint import Checkpoint, read_checkpoint

GOLDEN = Path(__file__).resolve().parent / "data" / "golden"
DIM, INNER, HEADS, KV, VOCAB, DRAFT = 16, 24, 4, 2, 64, 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
CONFIG3 = CONFIG | {"draft_vocab_size": DRAFT}
IDS = torch.tensor([0, 1, 2, 3, 7, 8, 20, 21, 22, 40, 62, 63])  # the draft vocabulary
OUTER = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def layer_tensors(prefix: str, width: int, biases: tuple[str, ...] = ()) -> dict[str, Tensor]:
    head_dim = DIM // HEADS
    shapes = {
        "self_attn.q_proj": (DIM, width),
        "self_attn.k_proj": (KV * head_dim, width),
        "self_attn.v_proj": (KV * head_dim, width),
        "self_attn.o_proj": (DIM, DIM),
        "mlp.gate_proj": (INNER, DIM),
        "mlp.up_proj": (INNER, DIM),
        "mlp.down_proj": (DIM, INNER),
    }
    found = {f"{prefix}{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    for name in biases:
        found[f"{prefix}self_attn.{name}.bias"] = torch.randn(shapes[f"self_attn.{name}"][0])
    return found | {f"{prefix}post_attention_layernorm.weight": torch.rand(DIM)}


def eagle1(bias: bool = True, **extra: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {
        "embed_tokens.weight": torch.randn(VOCAB, DIM),
        "fc.weight": torch.randn(DIM, 2 * DIM),
    }
    tensors |= {"fc.bias": torch.randn(DIM)} if bias else {}
    return tensors | layer_tensors("layers.0.", DIM) | extra


def eagle3(prefix: str = "midlayer.", draft: int = DRAFT, levels: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {"fc.weight": torch.randn(DIM, levels * DIM), "norm.weight": torch.rand(DIM)}
    tensors |= layer_tensors(prefix, 2 * DIM)
    for name in ("input_layernorm", "hidden_norm"):
        tensors[f"{prefix}{name}.weight"] = torch.rand(DIM)
    tensors["lm_head.weight"] = torch.randn(draft, DIM)
    if draft < VOCAB:
        tensors["d2t"] = IDS - torch.arange(DRAFT)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), IDS)
    return tensors


def make(path: Path, config: dict, tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    return path


def nested(**changes) -> dict:
    """The speculators layout of CONFIG3: a layer's config inside the head's."""
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    outer |= {"draft_vocab_size": DRAFT, "transformer_layer_config": dict(CONFIG)}
    return outer | changes


def convert(path: Path, *flags: str) -> Checkpoint:
    out = path.parent / f"{path.name}.out"
    assert command("--checkpoint_dir", path, "--out", out, *flags) == 0
    return read_checkpoint(out)


def refusal(capsys, path: Path, *words: str) -> None:
    capsys.readouterr()
    out = path.parent / "refused.out"
    assert command("--checkpoint_dir", path, "--out", out) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1 and not out.exists(), captured.err
    line = lines[0].replace(str(path), "DIR")
    for word in words:
        assert word in line, line


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


# ---------------------------------------------------------------- the two families


def test_an_eagle1_head_keeps_every_tensor(tmp_path):
    source = eagle1()
    opened = convert(make(tmp_path / "head", CONFIG, source))
    config = DraftConfig.from_dict(opened.config)
    assert opened.kind == "draft" and config.family == "eagle1"
    assert config.own_embedding and not config.own_output and config.fc_bias
    assert (config.draft_vocab_size, config.target_dim, config.max_seq_length) == (VOCAB, DIM, 128)
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    expected = {
        "fc.weight": source["fc.weight"],
        "fc.bias": source["fc.bias"],
        "layer.attention.wqkv.weight": torch.cat(
            [source[f"{attention}{x}_proj.weight"] for x in "qkv"]
        ),
        "layer.attention.wo.weight": source[attention + "o_proj.weight"],
        "layer.feed_forward.w13.weight": torch.cat(
            [source[mlp + "gate_proj.weight"], source[mlp + "up_proj.weight"]]
        ),
        "layer.feed_forward.w2.weight": source[mlp + "down_proj.weight"],
        "layer.ffn_norm.weight": source["layers.0.post_attention_layernorm.weight"],
        "tok_embeddings.weight": source["embed_tokens.weight"],
    }
    found = dict(opened.tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_an_eagle3_head_keeps_every_tensor(tmp_path, capsys):
    source = eagle3()
    opened = convert(make(tmp_path / "head", CONFIG3, source))
    config = DraftConfig.from_dict(opened.config)
    assert config.family == "eagle3" and config.own_output and not config.own_embedding
    assert "borrows" in capsys.readouterr().err
    assert (config.draft_vocab_size, config.vocab_size, config.feature_layers) == (
        DRAFT,
        VOCAB,
        None,
    )
    found = dict(opened.tensors())
    assert found["layer.attention.wqkv.weight"].shape == (2 * DIM, 2 * DIM)
    pairs = {
        "layer.embed_norm.weight": "midlayer.input_layernorm.weight",
        "layer.hidden_norm.weight": "midlayer.hidden_norm.weight",
        "layer.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "fc.weight": "fc.weight",
        "d2t": "d2t",
    }
    assert all(torch.equal(found[ours], source[theirs]) for ours, theirs in pairs.items())
    assert found["d2t"].dtype == torch.int64 and "t2d" not in found


GOLDEN_HEADS = sorted(path.parent.name for path in GOLDEN.glob("*/head"))


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden_heads_convert_from_either_file(tmp_path, name):
    source = GOLDEN / name / "head"
    results = []
    for file in source.glob("*model.*"):
        folder = tmp_path / file.suffix[1:] / "head"
        folder.mkdir(parents=True)
        shutil.copy(source / "config.json", folder)
        shutil.copy(file, folder)
        opened = convert(folder)
        results.append((opened.config, {n: t.clone() for n, t in opened.tensors()}))
    assert len(results) == 1 + (name in ("eagle1_static_seed0", "eagle3_tiny_seed0"))
    for config, tensors in results:
        assert config == results[0][0]
        assert config["family"] == ("eagle3" if name.startswith("eagle3") else "eagle1")
        assert config["fc_bias"] == (name in ("eagle1_static_seed0", "eagle2_tiny_seed0"))
        assert all(torch.equal(tensor, results[0][1][n]) for n, tensor in tensors.items())


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_every_spelling_of_the_names_is_the_same_head(tmp_path, layer, prefix, pickled):
    expected = dict(convert(make(tmp_path / "plain", CONFIG3, eagle3())).tensors())
    renamed = {prefix + name: tensor for name, tensor in eagle3(layer).items()}
    found = dict(convert(make(tmp_path / "other", CONFIG3, renamed, pickled)).tensors())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_same_tensor_under_two_names_is_refused(tmp_path, capsys):
    tensors = eagle3() | {"layers.0.hidden_norm.weight": torch.rand(DIM)}
    refusal(capsys, make(tmp_path / "head", CONFIG3, tensors), "midlayer.hidden_norm", "layers.0.")


def test_config_may_lie_about_the_number_of_layers(tmp_path):
    assert convert(make(tmp_path / "head", CONFIG3 | {"num_hidden_layers": 40}, eagle3()))


def test_dtype_spares_the_map(tmp_path):
    opened = convert(make(tmp_path / "head", CONFIG3, eagle3()), "--dtype", "bf16")
    dtypes = {name: spec.dtype for name, spec in opened.specs.items()}
    assert dtypes.pop("d2t") == torch.int64 and set(dtypes.values()) == {torch.bfloat16}


# ---------------------------------------------------------------- published layouts


@pytest.mark.parametrize(
    "config, prefix, expected",
    [
        (CONFIG3, "midlayer.", "eagle"),
        (CONFIG3 | {"architectures": ["LlamaForCausalLMEagle3"]}, "midlayer.", "specforge"),
        (
            CONFIG3
            | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6}
            | {"tie_word_embeddings": True},
            "midlayer.",
            "angelslim",
        ),
        (
            CONFIG3
            | {"architectures": ["LlamaForCausalLMEagle3"]}
            | {"eagle_config": {"use_aux_hidden_state": True}},
            "layers.0.",
            "modelopt",
        ),
        (nested(), "layers.0.", "speculators"),
    ],
)
def test_every_published_layout_is_recognised(tmp_path, config, prefix, expected):
    tensors = eagle3(prefix)
    if expected == "modelopt":
        tensors.pop("t2d")
    opened = convert(make(tmp_path / "head", config, tensors))
    assert opened.config["source_format"] == expected == opened.source["format"]
    assert opened.config["own_output"]
    # flat layouts norm after taking the residual; speculators before, when it does not say
    assert opened.config["norm_before_residual"] == (expected == "speculators")


def test_speculators_eagle1_heads_call_fc_fusion_fc(tmp_path):
    tensors = {name.replace("fc.", "fusion_fc."): t for name, t in eagle1().items()}
    config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
    config |= {"transformer_layer_config": CONFIG}
    opened = convert(make(tmp_path / "head", config, tensors))
    assert (opened.config["family"], opened.config["fc_bias"]) == ("eagle1", True)
    assert opened.config["source_format"] == "speculators"


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("layout", [CONFIG3, nested()])
def test_norm_before_residual_is_taken_as_stated(tmp_path, layout, stated):
    path = make(tmp_path / "head", layout | {"norm_before_residual": stated}, eagle3())
    assert convert(path).config["norm_before_residual"] == stated


VARIANTS = {
    "norm_before_fc": {"input_norm.weight": torch.rand(3 * DIM)},
    "fc_norm": {f"fc_norm.{i}.weight": torch.rand(DIM) for i in range(3)},
}


@pytest.mark.parametrize("layout", ["flat", "eagle_config", "nested"])
@pytest.mark.parametrize("flag", VARIANTS)
def test_norm_variants_need_flag_and_tensor(tmp_path, capsys, flag, layout):
    config = {
        "flat": CONFIG3 | {flag: True},
        "eagle_config": CONFIG3 | {"eagle_config": {flag: True}},
        "nested": nested(**{flag: True}),
    }[layout]
    opened = convert(make(tmp_path / "head", config, eagle3() | VARIANTS[flag]))
    assert opened.config[flag]
    assert VARIANTS[flag].keys() <= opened.specs.keys()
    tensor = next(iter(VARIANTS[flag])).split(".")[0]
    refusal(capsys, make(tmp_path / "a", config, eagle3()), flag, tensor, "missing")
    bare = CONFIG3 if layout != "nested" else nested()
    refusal(capsys, make(tmp_path / "b", bare, eagle3() | VARIANTS[flag]), flag, tensor, "there")


def test_norm_variants_have_limits(tmp_path, capsys):
    tensors = eagle3() | VARIANTS["fc_norm"] | VARIANTS["norm_before_fc"]
    config = CONFIG3 | {"fc_norm": True, "norm_before_fc": True}
    refusal(capsys, make(tmp_path / "a", config, tensors), "exclude")
    tensors = without(eagle3() | VARIANTS["fc_norm"], "fc_norm.1.weight")
    refusal(capsys, make(tmp_path / "b", CONFIG3 | {"fc_norm": True}, tensors), "fc_norm.1.weight")
    config = nested(norm_before_fc=True)
    config["transformer_layer_config"] = CONFIG | {"norm_before_fc": False}
    refusal(capsys, make(tmp_path / "c", config, eagle3()), "norm_before_fc", "True and False")


def test_aux_norm_names_are_the_level_norms(tmp_path):
    names = dict(zip(VARIANTS["fc_norm"], ("low", "mid", "high"), strict=True))
    tensors = {f"aux_norm_{names[n]}.weight": t for n, t in VARIANTS["fc_norm"].items()}
    opened = convert(make(tmp_path / "head", CONFIG3 | {"use_aux_norm": True}, eagle3() | tensors))
    assert opened.config["fc_norm"]
    assert torch.equal(opened.tensor("fc_norm.1.weight"), VARIANTS["fc_norm"]["fc_norm.1.weight"])


def test_norm_output_means_two_things(tmp_path, capsys):
    """Nested: the next level reads the normed hidden. Flat: lm_head does, which is no variant."""
    for stated in (True, False):
        opened = convert(make(tmp_path / "nested", nested(norm_output=stated), eagle3()))
        assert opened.config["norm_output"] == stated
    opened = convert(make(tmp_path / "flat", CONFIG3 | {"norm_output": True}, eagle3()))
    assert not opened.config["norm_output"] and "norm_output" in capsys.readouterr().err
    refusal(
        capsys, make(tmp_path / "off", CONFIG3 | {"norm_output": False}, eagle3()), "norm_output"
    )


KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "config, expected",
    [
        (CONFIG3 | {KEY: [1, 2, 3]}, (2, 3, 4)),
        (CONFIG3 | {KEY: [2, 4, 5]}, (2, 4, 5)),
        (CONFIG3 | {"eagle_config": {KEY: [1, 15, 28]}}, (2, 16, 29)),
        (CONFIG3 | {"eagle_config": {KEY: [0, 5, 9]}}, (1, 6, 10)),
        (nested(**{KEY: [2, 16, 29]}), (2, 16, 29)),
        (nested(**{KEY: [1, 46, 90]}), (2, 47, 91)),
        (nested(**{KEY: None}), None),
        (CONFIG3 | {KEY: [2, 4, 5], "eagle_config": {KEY: [1, 3, 4]}}, (2, 4, 5)),
    ],
)
def test_stated_layers_become_residual_input_numbers(tmp_path, config, expected):
    opened = convert(make(tmp_path / "head", config, eagle3()))
    assert DraftConfig.from_dict(opened.config).feature_layers == expected


@pytest.mark.parametrize(
    "ids", [[2, 4, 4], [-1, 2, 3], [], [2, 4], [2, 4, 5, 6], ["2", 4, 5], [True, 4, 5], 3, "2,4,5"]
)
def test_impossible_layers_are_refused(tmp_path, capsys, ids):
    refusal(capsys, make(tmp_path / "head", CONFIG3 | {KEY: ids}, eagle3()), KEY)


def test_two_statements_about_the_layers_must_agree(tmp_path, capsys):
    config = CONFIG3 | {KEY: [2, 4, 6], "eagle_config": {KEY: [1, 3, 4]}}
    refusal(capsys, make(tmp_path / "head", config, eagle3()), KEY, "(2, 4, 6)", "(2, 4, 5)")


def test_four_features_work_when_named(tmp_path, capsys):
    config = CONFIG3 | {KEY: [2, 3, 4, 5]}
    opened = convert(make(tmp_path / "head", config, eagle3(levels=4)))
    assert opened.specs["fc.weight"].shape == (DIM, 4 * DIM)
    refusal(capsys, make(tmp_path / "bare", CONFIG3, eagle3(levels=4)), "fc.weight", KEY)


def test_a_wider_target_needs_its_width_and_an_own_embedding(tmp_path, capsys):
    config, wide = CONFIG3 | {"target_hidden_size": 40}, torch.randn(DIM, 3 * 40)
    tensors = eagle3() | {"fc.weight": wide}
    own = {"embed_tokens.weight": torch.randn(VOCAB, DIM)}
    opened = convert(make(tmp_path / "head", config, tensors | own))
    assert (opened.config["target_dim"], opened.config["own_embedding"]) == (40, True)
    refusal(capsys, make(tmp_path / "a", config, tensors), "embed_tokens", "40")
    refusal(capsys, make(tmp_path / "b", CONFIG3, tensors | own), "target_hidden_size", "120")


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize(
    "config, theta, source",
    [
        (CONFIG3, 10000.0, "default 10000"),
        (CONFIG3 | {"rope_theta": 500000.0}, 500000.0, "rope_theta"),
        (
            CONFIG3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            1e6,
            "rope_parameters",
        ),
        (
            nested(transformer_layer_config=CONFIG | {"rope_theta": 2e4}),
            2e4,
            "transformer_layer_config.rope_theta",
        ),
    ],
)
def test_the_rope_base_and_where_it_came_from(tmp_path, config, theta, source):
    opened = convert(make(tmp_path / "head", config, eagle3()))
    assert (opened.config["rope_theta"], opened.config["rope_source"]) == (theta, source)


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_map_of_any_integer_width_is_read(tmp_path, dtype):
    tensors = eagle3()
    tensors["d2t"] = tensors["d2t"].to(dtype)
    opened = convert(make(tmp_path / "head", CONFIG3, tensors))
    assert torch.equal(opened.tensor("d2t"), IDS - torch.arange(DRAFT))


def shifted(index: int, by: int) -> Tensor:
    d2t = IDS - torch.arange(DRAFT)
    d2t[index] += by
    return d2t


@pytest.mark.parametrize("t2d", [True, False])
@pytest.mark.parametrize(
    "d2t, word",
    [
        (shifted(0, -1), "0 to 63"),
        (shifted(-1, 1), "0 to 63"),
        (shifted(0, 1), "different"),
        (IDS, "absolute"),
        ((IDS - torch.arange(DRAFT)).float(), "integers"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path, capsys, d2t, word, t2d):
    tensors = eagle3() | {"d2t": d2t}
    if not t2d:
        tensors.pop("t2d")
    refusal(capsys, make(tmp_path / "head", CONFIG3, tensors), "d2t", word)


def test_a_map_and_its_mask_must_agree(tmp_path, capsys):
    other = torch.isin(torch.arange(VOCAB), IDS + (IDS == 40))
    refusal(capsys, make(tmp_path / "a", CONFIG3, eagle3() | {"t2d": other}), "d2t", "t2d")
    short = torch.ones(VOCAB - 1, dtype=torch.bool)
    refusal(capsys, make(tmp_path / "b", CONFIG3, eagle3() | {"t2d": short}), "t2d", "64")


def test_absolute_ids_that_could_be_offsets_are_noted(tmp_path, capsys):
    tensors = without(eagle3(), "t2d") | {"d2t": torch.arange(DRAFT)}
    convert(make(tmp_path / "head", CONFIG3, tensors))
    assert "absolute" in capsys.readouterr().err


def test_a_small_vocabulary_needs_a_map_of_its_length(tmp_path, capsys):
    refusal(capsys, make(tmp_path / "a", CONFIG3, without(eagle3(), "d2t")), "d2t", "12 of 64")
    tensors = eagle3()
    tensors["d2t"] = tensors["d2t"][:-1]
    refusal(capsys, make(tmp_path / "b", CONFIG3, tensors), "d2t: 11", "12")
    tensors["d2t"] = torch.tensor(3)
    refusal(capsys, make(tmp_path / "c", CONFIG3, tensors), "d2t")
    config = CONFIG3 | {"draft_vocab_size": 13}
    refusal(capsys, make(tmp_path / "d", config, eagle3()), "draft_vocab_size: 13", "12")
    config = CONFIG3 | {"vocab_size": 11}
    refusal(capsys, make(tmp_path / "e", config, eagle3()), "12", "11")


def test_the_small_vocabulary_may_be_read_off_the_tensors(tmp_path):
    assert convert(make(tmp_path / "head", CONFIG, eagle3())).config["draft_vocab_size"] == DRAFT


@pytest.mark.parametrize("d2t", [None, torch.zeros(VOCAB, dtype=torch.int64), torch.arange(VOCAB)])
def test_with_equal_vocabularies_there_is_no_map(tmp_path, capsys, d2t):
    tensors = eagle3(draft=VOCAB)
    if d2t is not None:
        tensors |= {"d2t": d2t, "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    opened = convert(make(tmp_path / "head", CONFIG | {"draft_vocab_size": VOCAB}, tensors))
    assert "d2t" not in opened.specs and opened.config["draft_vocab_size"] == VOCAB
    assert ("d2t is not zero" in capsys.readouterr().err) == (d2t is not None and bool(d2t.any()))


def test_an_eagle1_head_may_draft_over_a_reduced_vocabulary(tmp_path):
    tensors = eagle1(d2t=IDS - torch.arange(DRAFT))
    opened = convert(make(tmp_path / "head", CONFIG, tensors))
    assert opened.config["draft_vocab_size"] == DRAFT and not opened.config["own_output"]
    assert "d2t" in opened.specs


# ---------------------------------------------------------------- what is missing or left over


def test_an_output_matrix_is_borrowed_only_for_the_whole_vocabulary(tmp_path, capsys):
    tensors = without(eagle3(draft=VOCAB), "lm_head.weight")
    opened = convert(make(tmp_path / "head", CONFIG, tensors))
    assert not opened.config["own_output"] and "lm_head" in capsys.readouterr().err
    path = make(tmp_path / "small", CONFIG3, without(eagle3(), "lm_head.weight"))
    refusal(capsys, path, "lm_head.weight", "12")


def test_an_eagle1_state_with_the_targets_output_matrix_keeps_it(tmp_path):
    tensors = eagle1() | {"lm_head.weight": torch.randn(VOCAB, DIM)}
    assert convert(make(tmp_path / "head", CONFIG, tensors)).config["own_output"]


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_every_other_tensor_is_needed(tmp_path, capsys, family):
    tensors, config = (eagle1(), CONFIG) if family == "eagle1" else (eagle3(), CONFIG3)
    optional = {"embed_tokens.weight", "fc.bias", "t2d"}
    for name in tensors.keys() - optional:
        short = name.removeprefix("midlayer.").removeprefix("layers.0.")
        refusal(capsys, make(tmp_path / "head", config, without(tensors, name)), short)


def test_fc_bias_follows_the_tensor_but_not_into_nothing(tmp_path, capsys):
    assert convert(make(tmp_path / "a", CONFIG | {"bias": False}, eagle1())).config["fc_bias"]
    assert "fc.bias" in capsys.readouterr().err
    assert not convert(make(tmp_path / "b", CONFIG, eagle1(bias=False))).config["fc_bias"]
    refusal(capsys, make(tmp_path / "c", CONFIG | {"bias": True}, eagle1(bias=False)), "fc.bias")


def test_biases_of_q_k_and_v_are_carried_over(tmp_path):
    tensors = eagle1() | layer_tensors("layers.0.", DIM, ("q_proj", "k_proj", "v_proj"))
    opened = convert(make(tmp_path / "head", CONFIG | {"qkv_bias": True}, tensors))
    assert opened.config["qkv_bias"] and not opened.config["o_bias"]
    assert opened.specs["layer.attention.wqkv.bias"].shape == (2 * DIM,)


@pytest.mark.parametrize(
    "name, words",
    [
        ("layers.0.self_attn.k_norm.weight", ["no use"]),
        ("layers.1.mlp.up_proj.weight", ["several layers"]),
        ("midlayer.mlp.up_proj.weight_scale", ["quantised"]),
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", ["MLA"]),
        ("mask_hidden", ["mask_hidden"]),
    ],
)
def test_unsupported_tensors_are_refused_by_name(tmp_path, capsys, name, words):
    tensors = eagle3() | {name: torch.zeros(4)}
    refusal(capsys, make(tmp_path / "head", CONFIG3, tensors), name, *words)


@pytest.mark.parametrize(
    "name",
    ["layers.0.input_layernorm.weight", "norm.weight", "embedding_layernorm.weight"],
)
def test_eagle1_heads_with_extra_norms_are_refused(tmp_path, capsys, name):
    tensors = eagle1() | {name: torch.rand(DIM)}
    refusal(capsys, make(tmp_path / "head", CONFIG, tensors), "EAGLE-1", name)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sliding_window": 2048}, ["sliding_window", "2048"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "rotated once"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"hidden_size": 32}, ["hidden_size", "32", "[16, 48]"]),
        ({"num_attention_heads": 3}, ["num_attention_heads"]),
        ({"intermediate_size": 23}, ["gate_proj", "23"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"logit_scale": 0.5}, ["logit_scale"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"attention_bias": True}, ["attention_bias"]),
    ],
)
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_unsupported_head_configurations_are_refused(tmp_path, capsys, changes, words, layout):
    config = CONFIG3 | changes
    if layout == "nested":
        config = nested(transformer_layer_config=CONFIG | changes)
    refusal(capsys, make(tmp_path / "head", config, eagle3()), *words)


def test_other_unsupported_heads_are_refused(tmp_path, capsys):
    config = CONFIG3 | {"eagle_config": {"use_aux_hidden_state": False}}
    refusal(capsys, make(tmp_path / "a", config, eagle3()), "use_aux_hidden_state")
    config = nested(speculators_model_type="dflash")
    refusal(capsys, make(tmp_path / "b", config, eagle3()), "dflash")
    refusal(capsys, make(tmp_path / "c", nested(), eagle1()), "EAGLE-1", "EAGLE-3")
    refusal(
        capsys, make(tmp_path / "d", CONFIG | {"norm_before_fc": True}, eagle1()), "norm_before_fc"
    )


def test_a_switched_off_window_is_fine(tmp_path):
    config = CONFIG3 | {"sliding_window": 4096, "use_sliding_window": False}
    assert convert(make(tmp_path / "head", config, eagle3()))


def test_a_heads_tokenizer_does_not_follow_it(tmp_path):
    path = make(tmp_path / "head", CONFIG3, eagle3())
    (path / "tokenizer.json").write_text("{}")
    out = tmp_path / "out" / "head.safetensors"
    assert command("--checkpoint_dir", path, "--out", out) == 0
    assert [file.name for file in out.parent.iterdir()] == ["head.safetensors"]


def test_a_damaged_head_file_is_refused(tmp_path, capsys):
    path = make(tmp_path / "head", CONFIG3, eagle3())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refusal(capsys, path, "model.safetensors", "truncated")
    assert load_file(make(tmp_path / "head", CONFIG3, eagle3()) / "model.safetensors")
