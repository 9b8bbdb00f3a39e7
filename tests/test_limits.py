"""Memory, time or the compiler's cache is taken from a command: one line, or it is mended."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tiny import random_head, random_model, save_byte_tokenizer

from model import ModelConfig, Transformer
from talon.checkpoint import TensorSpec, read_checkpoint
from talon.graphs import remove_broken_libraries
from talon.writing import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    ["generate.py"], ["convert_hf_checkpoint.py"], ["quantize.py"], ["train_draft.py"],
    ["benchmark.py"], ["-m", "talon.serving"],
]  # fmt: skip
LARGE = ModelConfig(10**6, 512, 1, 4, 4, 128, 512, 1e-5, 1024)  # an embedding of 2 GB


def limited(gigabytes: float, *arguments: object) -> subprocess.CompletedProcess:
    """A command whose address space is limited, as by `ulimit -v`."""
    size = int(gigabytes * 1e9)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
    )


def sparse_file(path: Path, specs: dict[str, TensorSpec], metadata: dict[str, str]) -> None:
    """A whole safetensors file of zeros in fp32 that takes no room on the disk."""
    header, end = {"__metadata__": metadata}, 0
    for name, spec in specs.items():
        span = [end, end := end + spec.nbytes]
        header[name] = {"dtype": "F32", "shape": spec.shape, "data_offsets": span}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A target larger than the memory that the tests allow: ours, and as it is published."""
    directory = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in Transformer(LARGE).state_dict().items()}
    metadata = {"format": "talon", "version": "1", "kind": "target", "source": "{}"}
    metadata |= {"config": json.dumps(asdict(LARGE)), "quantization": "null"}
    specs = {name: TensorSpec(torch.float32, shape) for name, shape in shapes.items()}
    sparse_file(directory / "talon.safetensors", specs, metadata)
    save_byte_tokenizer(directory)
    (directory / "run").mkdir()
    (directory / "hf").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 10**6, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "hf" / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    square = [f"{layer}.self_attn.{name}_proj" for name in "qkvo"]
    square += [f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"]
    shapes = {"model.embed_tokens": (10**6, 512)}
    shapes |= dict.fromkeys(square, (512, 512)) | dict.fromkeys(norms, (512,))
    specs = {f"{name}.weight": TensorSpec(torch.float32, shape) for name, shape in shapes.items()}
    sparse_file(directory / "hf" / "model.safetensors", specs, {"format": "pt"})
    return directory


def check_out_of_memory(done: subprocess.CompletedProcess) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: out of memory (") and "ulimit -v" in lines[0]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_limit_too_small_for_torch_is_one_line(command):
    check_out_of_memory(limited(0.3, *command, "--help"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate.py", "--prompt_ids", "1 2", "--no_compile", "--checkpoint_path", "."],
        ["quantize.py", "--mode", "int8", "--checkpoint_path", "."],
        ["quantize.py", "--evaluate", "."],
        ["convert_hf_checkpoint.py", "--checkpoint_dir", "hf"],
        ["train_draft.py", "--out", "run", "--checkpoint_path", "."],
        ["benchmark.py", "--no_compile", "--max_new_tokens", "4", "--checkpoint_path", "."],
    ],
    ids=" ".join,
)
def test_a_checkpoint_larger_than_the_limit_is_one_line_and_nothing_is_left(large, arguments):
    before = sorted(large.rglob("*"))
    paths = {"hf": large / "hf", "run": large / "run", ".": large / "talon.safetensors"}
    check_out_of_memory(limited(2.3, *(paths.get(word, word) for word in arguments)))
    assert sorted(large.rglob("*")) == before


def test_a_checkpoint_is_mapped_into_memory_once(tiny):
    checkpoint = read_checkpoint(tiny / "talon.safetensors")
    taken = [checkpoint.tensor(name) for name in checkpoint.specs], dict(checkpoint.tensors())
    assert len(taken[0]) == len(taken[1]) == len(checkpoint.specs)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len([line for line in maps if line.endswith(str(checkpoint.path))]) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_ctrl_c_while_a_command_imports_torch_ends_it_quietly(command):
    program = subprocess.Popen(
        [sys.executable, *command, "--help"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    maps = Path(f"/proc/{program.pid}/maps")
    while "libtorch_cpu" not in maps.read_text():
        time.sleep(0.002)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=60) == (b"", b"") and program.returncode == 130


def test_libraries_that_a_killed_compiler_left_cut_short_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole = Path(torch._C.__file__).read_bytes()
    (tmp_path / "ab").mkdir()
    for name, data in (("whole", whole), ("half", whole[: len(whole) // 2]), ("empty", b"")):
        (tmp_path / "ab" / f"{name}.main.so").write_bytes(data)
    (tmp_path / "ab" / "compiling.so").write_bytes(whole[:99])
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "compiling.lock"):
        remove_broken_libraries.__wrapped__()
    left = sorted(path.name for path in (tmp_path / "ab").iterdir())
    assert left == ["compiling.so", "whole.main.so"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A directory with a target, a head and a tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    model = random_model(vocab_size=256)
    save(directory / "talon.safetensors", "target", model, set())
    save(directory / "head.safetensors", "draft", random_head(model), BORROWED)
    save_byte_tokenizer(directory)
    return directory


BORROWED = {"tok_embeddings.weight", "output.weight", "d2t"}


def save(path: Path, kind: str, module: torch.nn.Module, left_out: set[str]) -> None:
    tensors = {name: t for name, t in module.state_dict().items() if name not in left_out}
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    config = asdict(module.config)
    write_checkpoint(path, kind=kind, config=config, specs=specs, tensors=tensors.items())


def generate(tiny: Path, cache: Path, *arguments: object, **env: str) -> tuple[int, str, str]:
    given = ("--checkpoint_path", tiny / "talon.safetensors", "--prompt", "Hi")
    done = subprocess.run(
        [sys.executable, "generate.py", *map(str, (*given, "--max_new_tokens", 3, *arguments))],
        cwd=ROOT, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **env},
        capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_damaged_cache_is_mended_or_named(tiny, tmp_path):
    """Libraries are built again; what torch cannot make sense of is answered by the folder."""
    wanted = generate(tiny, tmp_path, "--no_compile")[:2]
    (library,) = tmp_path.glob("*/*.so")
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    assert generate(tiny, tmp_path, "--no_compile")[:2] == wanted
    library.unlink()
    source = library.with_suffix(".cpp")
    source.write_bytes(source.read_bytes()[:1000])
    code, out, err = generate(tiny, tmp_path, "--no_compile")
    assert (code, out) == wanted and f"delete the cache {tmp_path}" in err


@pytest.mark.slow
def test_a_cache_that_is_removed_while_it_is_compiled_into_is_named(tiny, tmp_path):
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(f'#!/bin/sh\nrm -rf {cache}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    code, _, err = generate(tiny, cache, "--compile", CXX=str(compiler))
    last = err.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in err
    assert last.startswith("error: torch.compile") and f"delete the cache {cache}" in last


@pytest.mark.slow
def test_tuning_without_a_compiler_is_one_line(tiny, tmp_path):
    head = ("--draft_checkpoint_path", tiny / "head.safetensors")
    code, _, err = generate(tiny, tmp_path, *head, CXX="/bin/false")
    assert code == 2 and "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("error: torch.compile does not work here")
