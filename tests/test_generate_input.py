"""What generate.py refuses: one line each, before anything is loaded."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from tiny import random_model
from world import LIMIT, VOCAB, save, save_tokenizer

from generate import main, parse_args, prompt_ids
from talon import text as text_module
from talon.checkpoint import TensorSpec, read_checkpoint
from talon.cli import run
from talon.loading import open_files
from talon.text import load
from talon.writing import write_checkpoint

MISUSES = [
    ((), ("no prompt", "--prompt")),
    (("--prompt", ""), ("prompt is empty",)),
    (("--prompt", "  \n"), ("prompt is empty",)),
    (("--prompt", "-"), ("prompt is empty",)),
    (("--prompt", "a\udcff"), ("not UTF-8",)),
    (("--prompt", "a", "--system", "\udcff"), ("--system", "not UTF-8")),
    (("--prompt", "a", "--stop", "\udcff"), ("--stop", "not UTF-8")),
    (("--prompt", "a", "--prompt_ids", "1"), ("--prompt_ids", "not allowed with")),
    (("--prompt", "a", "--interactive"), ("not allowed with",)),
    (("--prompt", "a", "--chat", "--no_chat"), ("not allowed with",)),
    (("--prompt_ids", ""), ("at least one",)),
    (("--prompt_ids", "1 x"), ("whole numbers",)),
    (("--prompt_ids", "1.5"), ("whole numbers",)),
    (("--prompt_ids", "-1"), ("whole numbers",)),
    (("--prompt_ids", "\u00b2"), ("whole numbers",)),
    (("--prompt_ids", "9" * 5000), ("whole numbers",)),
    (("--prompt_ids", "1 264"), ("264", "0 to 263")),
    (("--prompt_ids", "1", "--chat"), ("--chat", "--prompt")),
    (("--prompt_ids", "1", "--system", "x"), ("--system", "--prompt")),
    (("--prompt_file", "no_such_file"), ("no_such_file", "No such file")),
    (("--prompt_file", "/"), ("cannot be read", "directory")),
    (("--prompt", "a", "--system", "x", "--no_chat"), ("--system", "--no_chat")),
    (("--prompt", "a", "--max_new_tokens", "-1"), ("max_new_tokens -1", ">= 0")),
    (("--prompt", "a", "--max_new_tokens", "many"), ("--max_new_tokens", "many")),
    (("--prompt", "a", "--temperature", "-1"), ("temperature", ">= 0")),
    (("--prompt", "a", "--temperature", "nan"), ("temperature",)),
    (("--prompt", "a", "--temperature", "inf"), ("temperature",)),
    (("--prompt", "a", "--temperature", "1e300"), ("temperature",)),
    (("--prompt", "a", "--top_k", "-2"), ("top_k",)),
    (("--prompt", "a", "--top_k", "9" * 30), ("top_k",)),
    (("--prompt", "a", "--top_p", "0"), ("top_p",)),
    (("--prompt", "a", "--top_p", "1.5"), ("top_p",)),
    (("--prompt", "a", "--top_p", "nan"), ("top_p",)),
    (("--prompt", "a", "--seed", "-1"), ("seed",)),
    (("--prompt", "a", "--seed", str(2**63)), ("seed",)),
    (("--prompt", "a", "--seed", str(2**63 - 1), "--num_samples", "2"), ("seed",)),
    (("--prompt", "a", "--num_samples", "0"), ("num_samples", "at least 1")),
    (("--prompt", "a", "--stop", ""), ("stop",)),
    (("--prompt", "a", "--tree", "bush"), ("bush", "chain:K")),
    (("--prompt", "a", "--tree", "chain:5"), ("head", "--draft_checkpoint_path")),
    (("--prompt", "a", "--device", "gpu"), ("gpu", "cpu or cuda")),
    (("--prompt", "a", "--device", "mps"), ("mps",)),
    (("--prompt", "a", "--dtype", "float32"), ("float32", "fp32")),
    (("--prompt", "a", "--max_seq_length", "1"), ("max_seq_length", "2 to 512")),
    (("--prompt", "a", "--max_seq_length", "513"), ("max_seq_length", "2 to 512")),
    (("--prompt", "a", "--max_seq_length", "0"), ("max_seq_length", "2 to 512")),
    (("--prompt", "a", "--draft_checkpoint_path", ""), ("directory",)),
    (
        ("--prompt", "a", "--draft_checkpoint_path", "no_such_head"),
        ("no_such_head", "does not exist"),
    ),
    (("--prompt", "a", "--temprature", "1"), ("--temprature", "--help")),
    (("--prompt", "a", "b\nc"), ("b c", "--help")),
    (("--prompt", "a", "--top"), ("--top", "--help")),
    (("--prompt", "a", "--json", ""), ("--json", "directory")),
    (("--prompt", "a", "--json", "/dev/null"), ("--json", "no ordinary file")),
    (("--prompt", "a", "--json", "no_such_directory/o.json"), ("--json", "does not exist")),
    (("--prompt", "a", "--profile", "no_such_directory/o.json"), ("--profile", "does not exist")),
    (("--prompt", "a", "--json", "x" * 300), ("--json", "cannot be written")),
    (("--prompt", "a", "--json", "/proc/o.json"), ("--json", "cannot be written")),
    (("--prompt", "a", "--profile", "/proc/o.json"), ("--profile", "cannot be written")),
    (("--prompt", "a", "--retune"), ("--retune", "--draft_checkpoint_path")),
    (("--interactive", "--check"), ("--check", "--interactive")),
    (("--interactive", "--num_samples", "2"), ("--num_samples", "--interactive")),
    (("--interactive", "--profile", "p"), ("--profile", "--interactive")),
    (("--interactive", "--stop", ""), ("stop",)),
    (("--interactive", "--max_new_tokens", "-1"), ("max_new_tokens",)),
]


@pytest.mark.parametrize(("argv", "words"), MISUSES, ids=str)
def test_misuse_is_one_line_before_anything_is_loaded(refused, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_module, "load_target", None)
    refused(words, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named(refused):
    refused(("cuda", "--device cpu"), "--prompt", "a", "--device", "cuda")
    refused(("cuda", "--device cpu"), "--prompt", "a", "--device", "cuda:3")


def test_a_prompt_file_that_is_not_utf8_is_refused(refused, tmp_path):
    (tmp_path / "p").write_bytes("Grüße".encode("latin-1"))
    refused(("not UTF-8", "save it as UTF-8"), "--prompt_file", tmp_path / "p")


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(refused, cli, monkeypatch):
    """C62: limit - 1 gives one token, limit is refused."""
    ids = " ".join(["5"] * LIMIT)
    for words, argv in (
        (("512 tokens", "511 or less"), ("--prompt_ids", ids)),
        (("5120 tokens", "511 or less"), ("--prompt_ids", " ".join([ids] * 10))),
        (
            ("512 tokens", "--max_seq_length", "allows 512"),
            ("--prompt_ids", ids, "--max_seq_length", 100),
        ),
    ):
        line = refused(words, *argv)
        assert ("or raise" in line) == ("allows 512" in words)
    code, _, err = cli("--prompt_ids", ids[:-2], "--ignore_eos")
    assert code == 0 and "1 tokens (context)" in err


def test_outputs_never_overwrite_an_input_or_each_other(refused, world, tmp_path):
    (tmp_path / "p").write_text("hello")
    (tmp_path / "link").symlink_to(world / "talon.safetensors")
    (tmp_path / "t.json").write_text("[[0]]")
    head = ("--draft_checkpoint_path", world / "head.safetensors", "--tree", tmp_path / "t.json")
    argv = ("--prompt_file", tmp_path / "p", *head)
    inputs = [tmp_path / "p", tmp_path / "t.json", world / "talon.safetensors", tmp_path / "link"]
    inputs += [world / "head.safetensors", world / "tokenizer.json"]
    for path in inputs:
        before = path.read_bytes()
        refused(("input", "choose another name"), *argv, "--json", path)
        refused(("input", "choose another name"), *argv, "--profile", path)
        assert path.read_bytes() == before
    refused(("--json and --profile",), *argv, "--json", tmp_path / "x", "--profile", tmp_path / "x")
    both = (*argv[:-1], f"{tmp_path / 't.json'}+lookup:2")
    refused(("input", "choose another name"), *both, "--json", tmp_path / "t.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_closed_directory_is_refused(refused, tmp_path):
    tmp_path.chmod(0o500)
    refused(
        ("--json", "cannot be written", "Permission denied"),
        "--prompt",
        "a",
        "--json",
        tmp_path / "o",
    )


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def wrong_files(world: Path, directory: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Files that are no target, each with the words its refusal must hold."""
    good = (world / "talon.safetensors").read_bytes()
    contents = {
        "truncated": (good[:-100], ("truncated",)),
        "header_only": (good[:100], ("truncated",)),
        "longer": (good + b"x", ("bytes",)),
        "empty": (b"", ("empty",)),
        "lfs": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            ("LFS", "git lfs pull"),
        ),
        "text": (b"hello, this is not a model\n" * 9, ("not a safetensors file",)),
        "zeros": (bytes(1000), ("safetensors",)),
        "html": (b"<!DOCTYPE html><html>" + b" " * 500, ("safetensors",)),
    }
    files = {}
    for name, (data, words) in contents.items():
        (directory / name).write_bytes(data)
        files[name] = (directory / name, words)
    torch.save(
        {"weight": torch.zeros(2), "bomb": Bomb(directory / "marker")},
        directory / "pytorch_model.bin",
    )
    files["pickle"] = (directory / "pytorch_model.bin", ("pickle", "convert_hf_checkpoint.py"))
    with (directory / "old.bin").open("wb") as file:
        pickle.dump(Bomb(directory / "marker"), file)
    files["old pickle"] = (directory / "old.bin", ("convert", "safetensors"))
    files["directory"] = (world, ("directory", "convert_hf_checkpoint.py"))
    files["hf file"] = (world / "model.safetensors", ("convert_hf_checkpoint.py",))
    files["json"] = (world / "tokenizer.json", ("safetensors",))
    files["missing"] = (directory / "missing", ("does not exist",))
    files["device"] = (Path("/dev/null"), ("not a file",))
    return files


KINDS = (
    "truncated",
    "header_only",
    "longer",
    "empty",
    "lfs",
    "text",
    "zeros",
    "html",
    "pickle",
    "directory",
    "hf file",
    "json",
    "missing",
    "device",
)


@pytest.mark.parametrize("name", KINDS)
def test_files_of_the_wrong_kind_are_refused_as_target_and_as_head(refused, world, tmp_path, name):
    """C40, C46, C74: neither is any code of a pickle run."""
    path, words = wrong_files(world, tmp_path)[name]
    refused(words, "--prompt_ids", "5", target=path)
    refused(words, "--prompt_ids", "5", "--draft_checkpoint_path", path)
    assert not (tmp_path / "marker").exists()
    for arguments in ((path,), (world / "talon.safetensors", path)):
        with pytest.raises((ValueError, OSError)) as error:
            load(*arguments, compile=False)
        assert "\n" not in str(error.value)


def test_a_head_in_the_targets_place_is_refused_with_the_right_flag(refused, world):
    words = "is a draft", "--draft_checkpoint_path"
    refused(words, "--prompt_ids", "5", target=world / "head.safetensors")


def test_a_head_of_another_target_is_refused_with_both_numbers(refused, world):
    """C32."""
    for name, words in (
        ("other_head", ("hidden size 32", "64")),
        ("small_vocab_head", ("vocabulary 100", "264")),
    ):
        refused(
            words, "--prompt_ids", "5", "--draft_checkpoint_path", world / f"{name}.safetensors"
        )
    deep = (
        "--draft_checkpoint_path",
        world / "head.safetensors",
        "--tree",
        "dynamic:nodes=5,levels=2,top_k=265",
    )
    refused(("265", "264", "top_k"), "--prompt_ids", "5", *deep)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[[]]",
        "[[0], [2, 0]]",
        "[[0], [1, -1]]",
        "[[0], [0.5]]",
        "[[0], 3]",
        '[["0"]]',
        "[[true]]",
        "[[0], [1000000000000]]",
        "not json",
        "\x00",
        "null",
        "[" * 100_000,
        "[[0]" + ",[0]" * 10 + "]x",
    ],
)
def test_a_tree_file_that_is_no_tree_is_refused(refused, world, tmp_path, text):
    path = tmp_path / "tree.json"
    path.write_text(text)
    argv = ("--prompt_ids", "5", "--draft_checkpoint_path", world / "head.safetensors", "--tree")
    refused(("tree", "tree.json"), *argv, path)
    refused(("tree", "missing.json"), *argv, tmp_path / "missing.json")
    path.write_bytes(b"\xff\xfe[[0]]")
    refused(("tree", "tree.json"), *argv, path)


@pytest.mark.parametrize(
    "tree",
    [
        "",
        "chain",
        "chain:",
        "chain:0",
        "chain:-1",
        "chain:65",
        "chain:x",
        "chain:\u00b2",
        "chain:" + "9" * 5000,
        "static:3",
        "dynamic:nodes=0",
        "dynamic:levels=0",
        "dynamic:top_k=0",
        "dynamic:nodes=x",
        "dynamic:depth=3",
        "dynamic:nodes",
        "dynamic:nodes=\u00b2",
        "dynamic:nodes=9,levels=1,top_k=4",
        "dynamic:nodes=2,levels=1000000000,top_k=1",
        "dynamic:nodes=1000000,levels=1000,top_k=200",
        "lookup:0",
        "lookup:",
        "lookup:65",
        "lookup:\u00b2",
        "no_such.json",
        "None",
        "chain:5 ",
    ],
)
def test_a_tree_that_is_none_is_refused(refused, world, tree):
    refused(
        ("tree",),
        "--prompt_ids",
        "5",
        "--draft_checkpoint_path",
        world / "head.safetensors",
        "--tree",
        tree,
    )


def damaged(world: Path, out: Path, config=None, specs=None, quantization=None) -> Path:
    good = read_checkpoint(world / "bare" / "talon.safetensors")
    tensors = {name: tensor for name, tensor in good.tensors()}
    tensors = specs(tensors) if specs else tensors
    described = {
        name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    changed = config(dict(good.config)) if config else good.config
    write_checkpoint(
        out,
        kind="target",
        config=changed,
        specs=described,
        tensors=tensors.items(),
        quantization=quantization,
    )
    return out


@pytest.mark.parametrize(
    "config",
    [
        lambda c: {},
        lambda c: c | {"dim": "64"},
        lambda c: c | {"dim": None},
        lambda c: c | {"n_layer": 0},
        lambda c: c | {"n_layer": -1},
        lambda c: c | {"n_layer": 3},
        lambda c: c | {"n_head": 2.5},
        lambda c: c | {"new_field": 1},
        lambda c: c | {"rope_scaling": {"kind": "dynamic", "factor": 2}},
        lambda c: c | {"rope_scaling": {"what": 1}},
        lambda c: c | {"rope_scaling": 5},
        lambda c: c | {"dim": 128},
        lambda c: c | {"vocab_size": 100},
        lambda c: c | {"intermediate_size": 7},
        lambda c: c | {"eos_ids": None},
        lambda c: c | {"eos_ids": 5},
    ],
)
def test_a_file_whose_configuration_is_damaged_is_refused(refused, world, tmp_path, config):
    path = damaged(world, tmp_path / "x.safetensors", config)
    refused(("x.safetensors", "convert"), "--prompt_ids", "5", target=path)


def test_a_file_with_missing_or_foreign_tensors_is_refused(refused, world, tmp_path):
    def without(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}

    path = damaged(world, tmp_path / "x.safetensors", specs=without)
    refused(("norm.weight", "missing", "convert"), "--prompt_ids", "5", target=path)
    path = damaged(
        world, tmp_path / "x.safetensors", specs=lambda t: t | {"extra.weight": torch.zeros(3)}
    )
    refused(("extra.weight", "unused", "convert"), "--prompt_ids", "5", target=path)


def test_text_without_a_tokenizer_is_refused_with_the_way_out(refused, world):
    bare = world / "bare" / "talon.safetensors"
    for argv in (("--prompt", "a"), ("--interactive",), ("--prompt_ids", "5", "--stop", "x")):
        refused(("no tokenizer", "tokenizer.json", "--prompt_ids"), *argv, target=bare)
    engine = load(bare, compile=False)
    for prompt in ("a", [{"role": "user", "content": "a"}]):
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.generate(prompt)


def test_a_tokenizer_of_another_model_is_refused(refused, tmp_path):
    save(tmp_path / "talon.safetensors", random_model(vocab_size=100, max_seq_length=64), "target")
    save_tokenizer(tmp_path)
    refused(("263", "100", "tokenizer"), "--prompt", "a", target=tmp_path / "talon.safetensors")


def test_a_broken_tokenizer_or_template_is_refused(refused, world, tmp_path):
    save(
        tmp_path / "talon.safetensors", random_model(vocab_size=VOCAB, max_seq_length=64), "target"
    )
    target = tmp_path / "talon.safetensors"
    (tmp_path / "tokenizer.json").write_text("{")
    refused(("tokenizer.json",), "--prompt", "a", target=target)
    save_tokenizer(tmp_path, None)
    refused(("--chat", "--no_chat"), "--prompt", "a", "--chat", target=target)
    refused(("--system",), "--prompt", "a", "--system", "x", target=target)
    for template in (
        "{{ 1 / 0 }}",
        "{% if",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
    ):
        save_tokenizer(tmp_path, template)
        refused(("template", "--no_chat"), "--prompt", "a", target=target)


THINKING = (
    "{{ messages[0]['content'] }}{% if enable_thinking is defined and enable_thinking is false %}"
    "</think>{% endif %}{% if effort %}{{ effort }}{% endif %}"
)


def test_template_options_reach_the_template(world, tmp_path):
    path = save(tmp_path / "m", random_model(vocab_size=VOCAB, max_seq_length=64), "target")
    save_tokenizer(tmp_path, THINKING)
    files = open_files(path)

    def prompt(*options: str) -> str:
        flags = [part for option in options for part in ("--template_option", option)]
        args = parse_args(["--checkpoint_path", str(path), "--prompt", "hi", *flags])
        return files.tokenizer.decode(prompt_ids(args, files, "hi"))

    assert prompt() == prompt("enable_thinking=true") == "hi"
    assert prompt("enable_thinking=false") == "hi</think>"
    assert prompt("enable_thinking=false", 'effort="low=1"') == "hi</think>low=1"
    engine = load(path, compile=False)
    engine.template_options = {"enable_thinking": False}
    ids = engine.encode([{"role": "user", "content": "hi"}])
    assert files.tokenizer.decode(ids) == "hi</think>"


def test_template_options_without_effect_are_refused(refused, world, tmp_path):
    target = save(tmp_path / "m", random_model(vocab_size=VOCAB, max_seq_length=64), "target")
    save_tokenizer(tmp_path, THINKING)
    option = "--template_option"
    for given in ("enable_thinking", "enable_thinking=no", "=1", "thinking=1", "messages=[]"):
        words = option, given.partition("=")[0]
        refused(words, "--prompt", "a", option, given, target=target)
    refused((option, "effort"), "--prompt", "a", "--no_chat", option, "effort=1", target=target)
    refused(("NAME=VALUE",), "--prompt", "a", option, "x=" + "[" * 100_000, target=target)
    refused((option, "effort"), "--prompt_ids", "5", option, "effort=1", target=target)


def test_the_missing_demo_model_names_its_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(lambda: main(["--prompt", "a"]))
    assert ended.value.code == 2
    assert "make demo" in capfd.readouterr().err


def test_what_does_not_fit_in_memory_is_refused_before_it_is_loaded(refused, monkeypatch):
    monkeypatch.setattr(text_module, "available_memory", lambda device: 10**6)
    refused(("GB", "quantize.py", "--max_seq_length"), "--prompt_ids", "5")
