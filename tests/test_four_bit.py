"""Published 4-bit checkpoints: every value kept, from any packing; what does not fit is refused.

tests/data/four_bit.safetensors holds one layer [32, 64] in groups of 32 as the packing code of
AutoGPTQ 0.7.1, AutoAWQ 0.2.9 and compressed-tensors 0.20.1 wrote it, with the steps, points and
scales that it was given. The packings below are plain loops over the formats' definitions."""

import copy
import json

import pytest
import torch
from hf_folders import CONFIG, ROOT, convert, make, refusal, shard, tensors_of, tiny_tensors
from safetensors.torch import load_file
from tiny import unpack_int4

from talon.checking import slow_greedy
from talon.checkpoint import read_checkpoint
from talon.formats.four_bit import PackedFolder
from talon.kernels import cpu_kernels
from talon.kernels.linear import unpacked
from talon.loading import load_target, open_files

GROUP = 32
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": GROUP,
    "actorder": None,
}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
SYMMETRIC = copy.deepcopy(CT)
SYMMETRIC["config_groups"]["group_0"]["weights"]["symmetric"] = True
KINDS = {
    "gptq": GPTQ,
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "awq": AWQ,
    "ct": CT,
    "symmetric": SYMMETRIC,
}


def words(numbers, places):
    """int32 [.., n / 8] of int [.., n]: number j of eight stands at 4 * places[j] bits."""
    eights = numbers.long().view(*numbers.shape[:-1], -1, 8)
    word = sum(eights[..., j] << 4 * place for j, place in enumerate(places))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def packed(kind, steps, points, scales):
    """The tensors of a layer: steps [out, in], points and scales [out, groups]."""
    plain, awq = range(8), (0, 4, 1, 5, 2, 6, 3, 7)
    if kind in ("ct", "symmetric"):
        found = {
            "weight_packed": words(steps, plain),
            "weight_scale": scales,
            "weight_shape": torch.tensor(steps.shape),
        }
        if kind == "ct":
            found["weight_zero_point"] = words(points.t(), plain).t()
        return found
    if kind == "awq":
        found = {"qweight": words(steps.t(), awq), "qzeros": words(points.t(), awq)}
    else:
        stored = points - 1 & 15 if kind == "gptq" else points
        found = {"qweight": words(steps, plain).t(), "qzeros": words(stored.t(), plain)}
        found["g_idx"] = (torch.arange(steps.shape[1]) // GROUP).int()
    return found | {"scales": scales.t()}


def directory(path, kind, changes=None, dtype=torch.float16, edit=None):
    """A packed model, and the same one dequantised to fp32: {name: tensor}."""
    sizes, rand = CONFIG | SIZES, torch.Generator().manual_seed(3)
    tensors, plain = {}, {}
    for name, tensor in tiny_tensors(sizes).items():
        if "proj" not in name:
            tensors[name] = plain[name] = tensor
            continue
        out, width = tensor.shape
        steps = torch.randint(0, 16, (out, width), generator=rand)
        points = torch.randint(0, 16, (out, width // GROUP), generator=rand)
        points = points.fill_(8) if kind == "symmetric" else points
        scales = (torch.rand(points.shape, generator=rand) * 0.02 + 1e-3).to(dtype)
        layer = name.removesuffix(".weight")
        for part, value in packed(kind, steps, points, scales).items():
            tensors[f"{layer}.{part}"] = value.contiguous()
        wide = [t.repeat_interleave(GROUP, 1) for t in (points, scales.float())]
        plain[name] = (steps - wide[0]) * wide[1]
    if edit:
        edit(tensors)
    config = SIZES | {"quantization_config": KINDS[kind] | (changes or {})}
    return make(path, config, tensors), plain


def weights_of(path):
    """Every linear of a file of ours in fp32, by its name, from the stored tensors alone."""
    checkpoint = read_checkpoint(path)
    stored, found = tensors_of(checkpoint), {}
    for layer in checkpoint.quantization["layers"]:
        steps = unpack_int4(stored[f"{layer}.weight"], GROUP).float() - 8
        steps = steps.view(len(steps), -1, GROUP)
        scales, zeros = (stored[f"{layer}.{part}"][..., None] for part in ("scales", "zeros"))
        found[layer] = (steps * scales + zeros).flatten(1)
    return found


def expected_of(plain, layer):
    """The fused linear `layer` of a model in Hugging Face names."""
    _, index, block, linear = layer.split(".")
    parts = {
        "wqkv": ("q_proj", "k_proj", "v_proj"),
        "wo": ("o_proj",),
        "w13": ("gate_proj", "up_proj"),
        "w2": ("down_proj",),
    }[linear]
    block = {"attention": "self_attn", "feed_forward": "mlp"}[block]
    return torch.cat([plain[f"model.layers.{index}.{block}.{part}.weight"] for part in parts])


@pytest.mark.parametrize("kind, name", [("gptq", "gptq"), ("awq", "awq"), ("ct", "ct")])
def test_what_the_peers_packed_is_what_they_were_given(tmp_path, kind, name):
    fixture = load_file(ROOT / "tests" / "data" / "four_bit.safetensors")
    steps, points, scales = (fixture[part] for part in ("steps", "points", "scales"))
    layer = "model.layers.0.self_attn.o_proj"
    theirs = {n.replace(name, layer): t for n, t in fixture.items() if n.startswith(f"{name}.")}
    folder = PackedFolder(make(tmp_path, {"quantization_config": KINDS[kind]}, theirs))
    got = {part: folder.read(f"{layer}.{part}") for part in ("weight", "scales", "zeros")}
    assert torch.equal(unpack_int4(got["weight"], GROUP), steps)
    assert torch.equal(got["scales"], scales.float())
    assert torch.equal(got["zeros"], (8 - points.float()) * scales.float())
    mine = packed(kind, steps, points, scales)
    assert all(torch.equal(theirs[f"{layer}.{part}"], value) for part, value in mine.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_kept_bit_for_bit(tmp_path, kind, dtype):
    path, plain = directory(tmp_path, kind, dtype=dtype)
    if dtype == torch.float16:  # parts of a layer in different files
        shard(path, load_file(path / "model.safetensors"))
        (path / "model.safetensors").unlink()
    checkpoint = convert(path)
    assert checkpoint.quantization["mode"] == "int4"
    assert checkpoint.quantization["groupsize"] == GROUP
    found = weights_of(path / "talon.out")
    assert len(found) == 4 * CONFIG["num_hidden_layers"] and "output" not in found
    for layer, weight in found.items():
        assert torch.equal(weight, expected_of(plain, layer)), layer


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_dequantised_model(tmp_path, kind, monkeypatch):
    """Where activations stay as they are; sums may differ in their order."""
    monkeypatch.setattr(cpu_kernels, "integer_route", lambda: "floats")
    path, plain = directory(tmp_path / "packed", kind)
    other = make(tmp_path / "plain", SIZES, plain)
    models = []
    for folder in (path, other):
        convert(folder)
        files = open_files(folder / "talon.out")
        models.append(load_target(files, torch.device("cpu"), torch.float32))
    for name, linear in models[0].named_modules():
        if hasattr(linear, "pack"):
            weight = models[1].get_submodule(name).weight
            torch.testing.assert_close(unpacked(linear).weight, weight, rtol=0, atol=0)
    texts = [slow_greedy(model, [1, 5, 9], 24) for model in models]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["gptq", "awq", "ct"])
def test_a_dtype_is_that_of_the_other_tensors(tmp_path, kind):
    path, _ = directory(tmp_path, kind)
    specs = convert(path, "--dtype", "bf16").specs
    assert specs["norm.weight"].dtype == torch.bfloat16
    assert specs["layers.0.attention.wo.scales"].dtype == torch.float32
    assert specs["layers.0.attention.wo.weight"].dtype == torch.uint8


def test_biases_of_zeros_are_no_biases(tmp_path):
    def add(tensors, value):
        for name in [*tensors]:
            if name.endswith("qweight"):
                layer = name.removesuffix(".qweight")
                tensors[f"{layer}.bias"] = torch.full((tensors[name].shape[1],), value)

    path, _ = directory(tmp_path / "zeros", "gptq", edit=lambda t: add(t, 0.0))
    assert not convert(path).config["qkv_bias"]
    path, _ = directory(tmp_path / "ones", "gptq", edit=lambda t: add(t, 1.0))
    assert convert(path).config["qkv_bias"]


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("gptq", {"bits": 8}, ["bits is 8", "supported: 4"]),
        ("gptq", {"group_size": -1}, ["group_size is -1", "32, 64, 128, 256"]),
        ("gptq", {"group_size": 64}, ["scales", "groups of 64"]),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format is 'marlin'"]),
        ("awq", {"version": "gemv"}, ["version is 'gemv'", "gemm"]),
        ("awq", {"zero_point": False}, ["zero_point"]),
        ("ct", {"format": "float-quantized"}, ["format is 'float-quantized'", "pack-quantized"]),
        ("ct", {"config_groups": {}}, ["config_groups is {}"]),
        ("ct", {"transform_config": {"rotation": {}}}, ["transform_config"]),
        ("gptq", {"quant_method": "bitsandbytes"}, ["bitsandbytes", "gptq, awq", "float16"]),
        ("gptq", {"quant_method": "fp8"}, ["fp8", "gptq, awq", "float16"]),
        ("gptq", {"quant_method": "exl2"}, ["exl2", "gptq, awq", "float16"]),
        ("gptq", {"quant_method": None}, ["None", "gptq, awq"]),
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(tmp_path, capsys, kind, changes, words):
    refusal(capsys, directory(tmp_path, kind, changes)[0], *words)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_bits": 8}, ["num_bits is 8"]),
        ({"strategy": "channel"}, ["strategy is 'channel'"]),
        ({"type": "float"}, ["type is 'float'"]),
        ({"actorder": "group"}, ["weight_g_idx is missing"]),
    ],
)
def test_other_weights_of_compressed_tensors_are_refused_by_name(tmp_path, capsys, changes, words):
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}
    refusal(capsys, directory(tmp_path, "ct", {"config_groups": groups})[0], *words)


LAYER = "model.layers.1.mlp.up_proj"


def damage(part, change):
    def edit(tensors):
        value = change(tensors.pop(f"{LAYER}.{part}"))
        if value is not None:
            tensors[f"{LAYER}.{part}"] = value.contiguous()

    return edit


@pytest.mark.parametrize(
    "kind, part, change, words",
    [
        ("gptq", "scales", lambda t: None, ["scales is missing"]),
        ("gptq", "qzeros", lambda t: None, ["qzeros is missing"]),
        ("awq", "qzeros", lambda t: t[:, :-1], ["qzeros is", "[2, 11]"]),
        ("awq", "scales", lambda t: t[:1], ["scales is", "[1, 96]"]),
        ("ct", "weight_zero_point", lambda t: None, ["weight_zero_point is missing"]),
        ("ct", "weight_scale", lambda t: t.int(), ["weight_scale is torch.int32"]),
        ("ct", "weight_shape", lambda t: t + 1, ["weight_shape"]),
        ("gptq", "qweight", lambda t: t[0], ["qweight"]),
        ("gptq", "qweight", lambda t: t.long(), ["qweight is torch.int64"]),
        ("gptq", "qweight", lambda t: t[:-1], ["up_proj"]),
        ("gptq", "qweight", lambda t: None, ["up_proj"]),
        ("gptq", "g_idx", lambda t: t.flip(0), ["g_idx is not in order", "desc_act"]),
        ("gptq", "scales", lambda t: t * float("nan"), ["NaN"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, capsys, kind, part, change, words):
    path, _ = directory(tmp_path, kind, edit=damage(part, change))
    refusal(capsys, path, *words)


def test_a_layer_that_is_stored_twice_is_refused(tmp_path, capsys):
    """Neither copy may win unseen."""

    def add(tensors):
        tensors[f"{LAYER}.weight"] = torch.zeros(96, 64)

    path, _ = directory(tmp_path, "gptq", edit=add)
    refusal(capsys, path, f"{LAYER}.weight beside {LAYER}.qweight")


def test_inputs_that_were_sorted_are_refused_even_without_the_tensor_that_says_how(
    tmp_path, capsys
):
    def drop(tensors):
        for name in [*tensors]:
            if name.endswith("g_idx"):
                del tensors[name]

    path, _ = directory(tmp_path / "a", "gptq", {"desc_act": True}, edit=drop)
    refusal(capsys, path, "g_idx is missing")
    convert(directory(tmp_path / "b", "gptq", {"desc_act": True})[0])  # sorted within groups alone
    convert(directory(tmp_path / "c", "gptq", edit=drop)[0])


def test_a_file_for_another_program_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    refusal(capsys, tmp_path, "model.Q4_K_M.gguf", "Hugging Face format")
