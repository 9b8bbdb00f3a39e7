"""generate.py under torchrun: one voice, and one end for all processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import random_head, random_model
from world import LIMIT, ROOT, VOCAB, save, save_tokenizer

pytestmark = pytest.mark.slow
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
import generate
from talon.decoder import Decoder
from talon.parallel import one_of_several
from talon.cli import run
if os.environ["RANK"] == "1":
{second}
main = one_of_several(generate.main)
run(main)
"""
DYING = """
    commit = Decoder.commit
    def die(self, ids):
        commit(self, ids)
        if len(self.cached) > 20:
            os.kill(os.getpid(), signal.SIGKILL)
    Decoder.commit = die
"""
OTHER = """
    sys.argv = [word.replace("a.safetensors", "b.safetensors") for word in sys.argv]
"""
OTHER_SEED = """
    sys.argv += ["--seed", "1"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    for name, seed in (("a", 0), ("b", 1)):
        model = random_model(seed, vocab_size=VOCAB, max_seq_length=LIMIT)
        save(folder / f"{name}.safetensors", model, "target")
        save(folder / f"head_{name}.safetensors", random_head(model), "draft")
    save_tokenizer(folder)
    return folder


def torchrun(folder: Path, script: Path, *words: object, count: int = 2, stdin: str = ""):
    """Start it; standard input is at its end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc_per_node={count}", script, *words, "--no_compile"]
    command += ["--checkpoint_path", folder / "a.safetensors"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        list(map(str, command)), stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )
    started.stdin.write(stdin)
    started.stdin.close()
    started.stdin = None
    return started


def left(folder: Path) -> list[str]:
    """The command lines of processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if bytes(folder) in words:
            found.append(words.replace(b"\0", b" ").decode())
    return found


def ended(started: subprocess.Popen, folder: Path, seconds: float = 300) -> list[str]:
    """The lines that are not torchrun's own, once nothing is left running."""
    _, err = started.communicate(timeout=seconds)
    assert started.returncode == 1 and not left(folder)
    before, _, _ = err.partition("Traceback (most recent call last)")  # torchrun's, in its words
    assert "talon/" not in err
    return [x for x in before.splitlines() if x.startswith("error:")]


def test_text_json_and_check_are_those_of_one_process(folder, tmp_path):
    words = (
        "--draft_checkpoint_path",
        folder / "head_a.safetensors",
        "--tree",
        "chain:3",
        "--check",
    )
    words += ("--prompt", "-", "--max_new_tokens", 12, "--temperature", 3, "--json")
    alone = [sys.executable, ROOT / "generate.py", *words, tmp_path / "one.json", "--no_compile"]
    alone += ["--checkpoint_path", folder / "a.safetensors"]
    one = subprocess.run(list(map(str, alone)), input="hello", capture_output=True, text=True)
    both = torchrun(folder, ROOT / "generate.py", *words, tmp_path / "two.json", stdin="hello")
    out, err = both.communicate(timeout=300)
    assert both.returncode == 0, err
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert out == one.stdout
    assert first["samples"][0]["tokens"] == second["samples"][0]["tokens"]
    assert (first["world_size"], second["world_size"]) == (1, 2)
    assert second["check"]["identical"]


def test_a_conversation_is_read_once(folder, tmp_path):
    words = ("--interactive", "--tree", "none", "--max_new_tokens", 4, "--json", tmp_path / "o")
    both = torchrun(folder, ROOT / "generate.py", *words, stdin="one\ntwo\n")
    _, err = both.communicate(timeout=300)
    assert both.returncode == 0, err
    assert len(json.loads((tmp_path / "o").read_text())["samples"]) == 2


@pytest.mark.parametrize(
    ("second", "count", "word"),
    [
        (DYING, 2, "another process has ended"),
        (OTHER, 2, "different checkpoints"),
        (OTHER_SEED, 2, "different tokens"),
        ("    pass", 4, "2 key/value heads"),
    ],
)
def test_what_ends_one_ends_all_and_is_said_once(folder, tmp_path, second, count, word):
    script = tmp_path / "two.py"
    script.write_text(SCRIPT.format(root=str(ROOT), second=second))
    words = ("--prompt", "hello", "--tree", "none", "--max_new_tokens", 300, "--temperature", 9)
    lines = ended(torchrun(folder, script, *words, count=count), folder)
    assert len(lines) == 1 and word in lines[0], lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_torchrun_leaves_nothing_behind(folder, number):
    words = ("--prompt", "hello", "--tree", "none", "--max_new_tokens", 400, "--ignore_eos")
    started = torchrun(folder, ROOT / "generate.py", *words)
    started.stdout.read(1)  # it speaks
    started.send_signal(number)
    asked = time.monotonic()
    _, err = started.communicate(timeout=60)
    while left(folder) and time.monotonic() < asked + 15:
        time.sleep(0.1)
    assert not left(folder) and time.monotonic() < asked + 10
    assert "talon/" not in err


def test_a_port_in_use_is_one_line(folder):
    """Started by hand, as another launcher would."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        group["MASTER_PORT"] = str(taken.getsockname()[1])
        command = [sys.executable, str(ROOT / "generate.py"), "--prompt", "hello"]
        done = subprocess.run(command, env=os.environ | group, capture_output=True, text=True)
    assert done.returncode == 2
    lines = [x for x in done.stderr.splitlines() if x]
    assert len(lines) == 1 and lines[0].startswith("error: ") and group["MASTER_PORT"] in lines[0]
