"""generate.py as a program of its own: streams, signals, compilers."""

import subprocess
import sys
from collections import Counter
from types import ModuleType

import pytest
from world import ROOT, record, shell

from eagle_draft import DraftConfig
from model import ModelConfig
from talon import checkpoint, loading


def test_the_program_prints_text_in_any_locale(world, plain):
    ids = " ".join(str(i) for i in range(90, 200))
    text = plain.generate([int(i) for i in ids.split()], max_new_tokens=60, ignore_eos=True)
    wanted = "".join(text)
    assert not wanted.isascii()
    argv = ("--prompt_ids", ids, "--max_new_tokens", 60, "--ignore_eos", "--no_compile")
    done = shell(world, *argv, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii") == wanted.encode("ascii", "replace").decode("ascii") + "\n"


def test_bytes_on_standard_input_that_are_no_text_are_refused(world):
    for argv in (("--prompt", "-"), ("--interactive",)):
        done = shell(
            world,
            *argv,
            "--no_compile",
            env={"PYTHONIOENCODING": "utf-8:strict"},
            input=b"\xff\xfe\n",
        )
        assert done.returncode == 2 and b"error: " in done.stderr and b"UTF-8" in done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("close", ["<&-", ">&-", "2>&-", ">/dev/full"])
def test_closed_and_full_streams_end_without_a_traceback(world, close):
    command = f'"$0" "$1" --checkpoint_path "$2" --prompt - --no_compile --max_new_tokens 3 {close}'
    argv = [
        "bash",
        "-c",
        command,
        sys.executable,
        str(ROOT / "generate.py"),
        str(world / "talon.safetensors"),
    ]
    done = subprocess.run(argv, capture_output=True, input=b"hello", timeout=300)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    wanted = {
        "<&-": (2, b"empty"),
        ">&-": (0, b"3 tokens"),
        "2>&-": (0, b""),
        ">/dev/full": (2, b"No space left"),
    }
    assert (done.returncode, wanted[close][1] in done.stderr) == (wanted[close][0], True), (
        done.stderr
    )


def test_a_reader_that_leaves_ends_the_program_quietly(world, tmp_path):
    command = '"$0" "$1" --checkpoint_path "$2" --prompt x --no_compile --ignore_eos '
    command += "--num_samples 500 --temperature 1"
    argv = ["bash", "-c", f"set -o pipefail; {command} | head -n 1 >/dev/null"]
    argv += [sys.executable, str(ROOT / "generate.py"), str(world / "talon.safetensors")]
    done = subprocess.run(argv, capture_output=True, timeout=300)
    assert done.returncode == 0 and b"error" not in done.stderr and b"Traceback" not in done.stderr
    argv[2] = f"set -o pipefail; {command} --json {tmp_path / 'o'} | head -n 1 >/dev/null"
    done = subprocess.run(argv, capture_output=True, timeout=300)
    assert done.returncode == 2 and b"error: " in done.stderr and b"--json" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_program_help_names_every_flag_of_the_contract(world):
    text = shell(world, "--help").stdout.decode()
    for flag in (
        "checkpoint_path",
        "draft_checkpoint_path",
        "prompt",
        "prompt_file",
        "prompt_ids",
        "chat",
        "no_chat",
        "system",
        "interactive",
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "ignore_eos",
        "tree",
        "device",
        "dtype",
        "max_seq_length",
        "compile",
        "no_compile",
        "num_samples",
        "check",
        "highlight",
        "json",
        "profile",
    ):
        assert f"--{flag}" in text
    assert "default: True" not in text.split("--no_chat", 1)[1].split("--system", 1)[0]


@pytest.mark.parametrize(
    "compiled", ["--no_compile", pytest.param("--compile", marks=pytest.mark.slow)]
)
def test_an_unusable_cache_directory_is_named_in_one_line(world, tmp_path, compiled):
    """torch itself cannot be used without it, eager or not."""
    path = tmp_path / "file"
    path.write_text("")
    done = shell(world, "--prompt", "Hi", compiled, env={"TORCHINDUCTOR_CACHE_DIR": str(path)})
    last = done.stderr.decode().strip().splitlines()[-1]
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert last.startswith("error: ") and str(path) in last


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["CXX", pytest.param("PATH", marks=pytest.mark.slow)])
def test_a_missing_compiler_is_named_with_the_way_out(world, tmp_path, missing):
    """C67."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"PATH": str(tmp_path)} if missing == "PATH" else {"CXX": "/bin/false"}
    done = shell(world, "--prompt", "Hi", "--compile", env=env)
    last = done.stderr.decode().strip().splitlines()[-1]
    assert done.returncode == 2 and b"Traceback" not in done.stderr and done.stdout == b""
    assert last.startswith("error: ") and "C++ compiler" in last and "--no_compile" in last
    assert (
        shell(world, "--prompt", "Hi", "--no_compile", "--max_new_tokens", 2, env=env).returncode
        == 0
    )


@pytest.mark.slow
def test_compiled_runs_give_the_eager_text_and_do_not_recompile(cli, world, tmp_path):
    argv = ("--prompt", "Hello", "--max_new_tokens", 20, "--ignore_eos", "--json", tmp_path / "o")
    wanted = cli(*argv)[1]
    for draft in ((), ("--draft_checkpoint_path", world / "head.safetensors", "--tree", "chain:3")):
        code, out, err = cli(*argv, *draft, eager=False)
        top = record(tmp_path / "o")
        assert (code, out) == (0, wanted) and top["compile_s"] > 0 and top["recompiles"] == 0
        assert "compiled in" in err


def test_a_drafted_run_opens_and_parses_each_file_once(cli, world, monkeypatch):
    """One header of each file, one tokenizer, one configuration of each kind."""
    counted = []

    def counting(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            counted.append(name if isinstance(owner, ModuleType) else owner.__name__)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    counting(checkpoint, "read_header")
    counting(loading, "load_tokenizer")
    counting(ModelConfig, "from_dict")
    counting(DraftConfig, "from_dict")
    draft = ("--draft_checkpoint_path", world / "head.safetensors", "--tree", "chain:2")
    code, _, _ = cli("--prompt", "Hello", "--max_new_tokens", 4, *draft)
    assert code == 0
    once = {"load_tokenizer": 1, "ModelConfig": 1, "DraftConfig": 1}
    assert Counter(counted) == {"read_header": 2, **once}
