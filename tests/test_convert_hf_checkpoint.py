"""Conversion of targets: every tensor and setting arrives, and nothing else is accepted."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from hf_folders import (
    CONFIG,
    GOLDEN,
    ROOT,
    command,
    convert,
    make,
    refusal,
    shard,
    tensors_of,
    tiny_tensors,
    tokenizer_json,
)
from safetensors.torch import load_file

from convert_hf_checkpoint import main
from talon.checkpoint import read_checkpoint

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
    assert command("--checkpoint_dir", tmp_path) == 0
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_by_tensor(tmp_path, capsys, dtype, number):
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        for place in (0, 7, -1):
            tensors = {n: t.to(dtype) for n, t in tiny_tensors(CONFIG).items()}
            tensors[name].view(-1)[place] = number
            path = make(tmp_path, tensors=tensors)
            for flags in ((), ("--dtype", "fp32"), ("--dtype", "bf16")):
                refusal(capsys, path, name, "NaN or infinity", flags=flags)


def test_a_number_beyond_the_chosen_precision_is_refused(tmp_path, capsys):
    tensors = tiny_tensors(CONFIG)
    tensors["model.norm.weight"][3] = torch.finfo(torch.float32).max
    path = make(tmp_path, tensors=tensors)
    refusal(capsys, path, "model.norm.weight", "3.4e+38", "fp32", flags=("--dtype", "bf16"))
    assert convert(path).tensor("norm.weight")[3] == torch.finfo(torch.float32).max
    tensors["model.norm.weight"][3] = 65519.0  # rounds to what float16 holds
    convert(make(tmp_path, tensors=tensors), "--dtype", "fp16")


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


def test_packed_weights_are_said_to_be_quantised_not_misshapen(tmp_path, capsys):
    """NVFP4 as ModelOpt writes it: two numbers a byte, scales, nothing in config.json."""
    tensors, name = tiny_tensors(CONFIG), "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.zeros(16, 12, dtype=torch.uint8)
    refusal(capsys, make(tmp_path, tensors=tensors), name, "uint8", "quantised elsewhere")
    tensors = tiny_tensors(CONFIG)
    for ending in ("_packed", "_scale"):
        tensors[name + ending] = tensors[name].clone()
    tensors.pop(name)
    refusal(capsys, make(tmp_path, tensors=tensors), name + "_packed", "quantised elsewhere")


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


# ---------------------------------------------------------------- output and command line


def test_a_failure_midway_leaves_no_file_no_tokenizer_and_no_directory(tmp_path, capsys):
    tensors = tiny_tensors(CONFIG)
    tensors["lm_head.weight"][0] = 1e5
    path = make(tmp_path / "model", tensors=tensors)
    (path / "tokenizer.json").write_text(tokenizer_json(9))
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

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "aminmax", interrupt)
    before = sorted(os.listdir(tmp_path))
    assert command("--checkpoint_dir", tmp_path) == 130
    assert capsys.readouterr().err.strip() == "" and sorted(os.listdir(tmp_path)) == before


@pytest.fixture
def small_files():
    """No file may grow beyond 4 kB: the disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing(tmp_path, capsys, request):
    make(tmp_path)
    request.getfixturevalue("small_files")
    refusal(capsys, tmp_path, "DIR/talon.safetensors", "File too large")


def test_a_link_is_written_through(tmp_path, capsys):
    path, disk = make(tmp_path / "model"), tmp_path / "disk"
    disk.mkdir()
    (path / "talon.safetensors").symlink_to(disk / "t.safetensors")
    for _ in range(2):  # leading nowhere at first, then to a file
        assert command("--checkpoint_dir", path) == 0
        assert (path / "talon.safetensors").is_symlink()
        assert os.listdir(disk) == ["t.safetensors"]
    assert read_checkpoint(disk / "t.safetensors").config["dim"] == 16
    os.mkfifo(tmp_path / "pipe")
    refusal(capsys, path, "no ordinary file", flags=("--out", str(tmp_path / "pipe")))


@pytest.mark.parametrize("case", ["encoding", "full"])
def test_a_file_is_converted_even_where_that_cannot_be_said(tmp_path, case):
    path, out = make(tmp_path / "model"), tmp_path / "\u00fcber.safetensors"
    line = [sys.executable, "convert_hf_checkpoint.py", "--checkpoint_dir", path, "--out", out]
    environment = os.environ | ({"PYTHONIOENCODING": "ascii"} if case == "encoding" else {})
    with open("/dev/full" if case == "full" else os.devnull, "w") as stdout:
        done = subprocess.run(
            line, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0, done.stderr
    assert read_checkpoint(out).config["dim"] == 16
    assert ("standard output cannot be written" in done.stderr) == (case == "full")


INTERRUPTED = """
import sys, time
sys.path.insert(0, sys.argv[1])
import convert_hf_checkpoint as command
from talon.cli import run

def halfway(tensors, specs):
    yield next(tensors)
    print("writing", flush=True)
    time.sleep(60)

command.with_progress = halfway
run(lambda: command.main(sys.argv[2:]))
"""


def interrupted(number: int, *arguments: object) -> int:
    """The exit code of a conversion that gets a signal while it writes."""
    line = [sys.executable, "-c", INTERRUPTED, ROOT, *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(number)
        return process.wait()


def test_a_signal_leaves_nothing_and_what_a_kill_left_goes_with_the_next_run(tmp_path):
    path, out = make(tmp_path / "model"), tmp_path / "new" / "m.safetensors"
    (path / "tokenizer.json").write_text(tokenizer_json(9))
    for number in (signal.SIGTERM, signal.SIGHUP):
        assert interrupted(number, "--checkpoint_dir", path, "--out", out) == 128 + number
        assert os.listdir(tmp_path) == ["model"]
    assert interrupted(signal.SIGKILL, "--checkpoint_dir", path, "--out", out) < 0
    assert len([name for name in os.listdir(out.parent) if name.startswith(".")]) == 1
    os.utime(next(out.parent.glob(".*")), (0, 0))
    other = out.with_name("other.safetensors")
    assert command("--checkpoint_dir", path, "--out", other) == 0
    assert sorted(os.listdir(out.parent)) == ["other.safetensors", "tokenizer.json"]


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
