"""Whole runs of train_draft.py: heads that decode, runs that can be taken up again, mistakes."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_training import (
    HEADS,
    arguments,
    complaint,
    random_data,
    read_log,
    same_tensors,
    tensors,
    tiny_target,
    train,
    training_config,
    write_lines,
    write_target,
)
from torch import nn

import train_draft
from quantize import quantize_checkpoint
from talon.checkpoint import read_checkpoint
from talon.decoder import Decoder, Generation
from talon.kernels.linear import Int8Linear
from talon.loading import load_head, load_target, open_files
from talon.sampling import SamplingConfig
from talon.tokenizer import load_tokenizer
from talon.training.head import build_head, head_config
from talon.training.losses import Teacher, Unrolled, UnrolledAttention
from talon.training.run import TrainingRun
from talon.trees import chain, dynamic_tree


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), tiny_target())


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"ids": row.ids, "spans": row.spans} for row in random_data(40, seed=1)]
    return write_lines(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


@HEADS
def test_data_training_and_decoding_end_to_end(target: Path, tmp_path: Path, family: str) -> None:
    """The target talks to itself, a head is trained, generate.py's loader takes it, and the text
    does not change."""
    made = ["--answer_tokens", 600, "--data_batch", 8, "--epochs", 3]
    path = train(target, "self", tmp_path, *made, "--head", family)
    rows = [json.loads(line) for line in (tmp_path / "self.jsonl").read_text().splitlines()]
    assert sum(end - start for row in rows for start, end in row["spans"]) >= 600
    assert len({tuple(row["ids"]) for row in rows}) == len(rows)
    files = open_files(target, path)
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    prompt = rows[0]["ids"][: rows[0]["spans"][0][0]]
    texts = []
    for drafting in ((), (head, chain(3)), (head, dynamic_tree(nodes=9, levels=3, top_k=3))):
        decoder = Decoder(model, 200, *drafting, compile=False)
        generation = Generation(decoder, prompt, SamplingConfig(), 40)
        texts.append([token for token, _ in generation])
    assert texts[0] == texts[1] == texts[2]


@HEADS
def test_a_quantised_target_trains_a_head(target: Path, tmp_path: Path, family: str) -> None:
    quantised = tmp_path / "talon_int8.safetensors"
    quantize_checkpoint(target, "int8", out=quantised)
    for path in target.parent.glob("*.json"):
        shutil.copy(path, tmp_path)
    made = ["--answer_tokens", 300, "--data_batch", 4, "--epochs", 1]
    path = train(quantised, "self", tmp_path / "out", *made, "--head", family)
    files = open_files(quantised, path)
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    assert isinstance(head.output, nn.Linear if family == "eagle3" else Int8Linear)


@HEADS
def test_the_file_written_has_the_trainers_logits(
    target: Path, data_file: Path, tmp_path: Path, family: str
) -> None:
    """The scale of the inputs is folded into fc, and what decoding loads computes what training
    computed."""
    path = train(target, data_file, tmp_path / "run", "--epochs", 2, "--head", family)
    names = set(read_checkpoint(path).specs)
    assert ("output.weight" in names) == (family == "eagle3")
    assert "tok_embeddings.weight" not in names
    files = open_files(target, path)
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    state = torch.load(tmp_path / "run" / train_draft.STATE_FILE, weights_only=True)
    unscaled = state["head"]["fc.parametrizations.weight.original"]
    assert state["step"] > 0 and not torch.equal(unscaled, head.fc.weight)
    batch = Teacher(model, head.config, 64).batch(random_data(1))
    unrolled = Unrolled(head, head.output.weight, training_config(family))
    new = UnrolledAttention.__new__(UnrolledAttention)
    new.__dict__ = head.layer.attention.__dict__
    head.layer.attention = new
    with torch.no_grad():
        _, table = unrolled(batch, 3)
    assert torch.isfinite(table).all() and table[0, 0] == 34


def stop_at(step: int, *numbers: int) -> Callable[[TrainingRun], dict]:
    """TrainingRun.train_step, in whose step the signals arrive."""
    train_step = TrainingRun.train_step

    def stopped(run: TrainingRun) -> dict:
        if run.step == step:
            for number in numbers:
                signal.raise_signal(number)
        return train_step(run)

    return stopped


@HEADS
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    target: Path, data_file: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--epochs", 4, "--head", family)
    whole = train(target, data_file, tmp_path / "whole", *options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingRun, "train_step", stop_at(7, signal.SIGINT))
        train(target, data_file, tmp_path / "half", *options)
    half = train(target, data_file, tmp_path / "half", *options, "--resume")
    assert same_tensors(whole, half)
    logs = [read_log(out) for out in (whole.parent, half.parent)]
    for entry in (*logs[0], *logs[1]):
        del entry["cpu_s"]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_process_saves_the_training_as_ctrl_c_does(
    target: Path, data_file: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes twice in a moment, as torchrun passes on what a terminal has sent."""
    before = signal.getsignal(number)
    monkeypatch.setattr(TrainingRun, "train_step", stop_at(3, number, number))
    with pytest.raises(KeyboardInterrupt):
        train(target, data_file, tmp_path, "--epochs", 4)
    assert torch.load(tmp_path / train_draft.STATE_FILE, weights_only=True)["step"] == 4
    assert signal.getsignal(number) is before


def test_what_nohup_ignores_stays_ignored(
    target: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(TrainingRun, "train_step", stop_at(1, signal.SIGHUP))
        train(target, data_file, tmp_path, "--epochs", 1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_new_run_begins_its_log_and_an_old_one_is_gone(
    target: Path, data_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 7000}\n')  # killed before its first checkpoint
    train(target, data_file, tmp_path, "--epochs", 1)
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2, 3, 4, 5, 5]


def test_a_second_training_in_a_folder_is_refused_from_the_start(
    target: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, out = TrainingRun.train_step, tmp_path / "out"

    def meanwhile(run: TrainingRun) -> dict:
        for more in ((), ("--resume",), ("--data", "self")):
            with pytest.raises(ValueError, match="another training is under way"):
                train_draft.main(arguments(target, data_file, out, *more))
        return train_step(run)

    monkeypatch.setattr(TrainingRun, "train_step", meanwhile)
    train(target, data_file, out, "--epochs", 1)
    assert [entry["step"] for entry in read_log(out)] == [1, 2, 3, 4, 5, 5]


def test_a_step_of_many_tokens_is_several_forwards_with_the_gradient_of_their_mean(
    tmp_path: Path,
) -> None:
    """4096 tokens a step, as on a GPU, need no more room than 512."""
    model, data = tiny_target(), random_data(310)  # of 4,096 answer tokens and as many again
    config = training_config("eagle1", batch_tokens=4096, draft_vocab_size=300)
    head = build_head(head_config(model.config, config), model, torch.arange(300), config.seed)
    run = TrainingRun(model, head, data, config, tmp_path)
    batches = run.batches(0)
    assert len(batches) == 8 and max(int(batch.answer.sum()) for batch in batches) < 700
    run.accumulate(0)
    found = [parameter.grad for parameter in run.trained.values()]
    run.head.zero_grad()
    sum(run.unrolled(batch, 3)[0] for batch in batches).div(8).backward()
    for mine, right in zip(found, run.trained.values(), strict=True):
        torch.testing.assert_close(mine, right.grad)


def test_going_on_from_a_head_starts_where_it_ended(
    target: Path, data_file: Path, tmp_path: Path
) -> None:
    first = train(target, data_file, tmp_path / "first", "--epochs", 2)
    slow = ("--epochs", 1, "--lr", 1e-9)
    second = train(target, data_file, tmp_path / "second", *slow, "--init", first)
    for name, value in tensors(first).items():
        torch.testing.assert_close(tensors(second)[name], value)


def run_on_two(
    script: str | Path, target: Path, data_file: Path, out: Path, *options: object
) -> subprocess.CompletedProcess:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    command = [*torchrun, str(script), *arguments(target, data_file, out, *options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def train_on_two(target: Path, data_file: Path, out: Path, *options: object) -> Path:
    done = run_on_two(train_draft.__file__, target, data_file, out, "--epochs", 2, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    return out / train_draft.HEAD_FILE


@pytest.mark.slow
def test_processes_stop_together_when_one_is_asked_to(
    target: Path, data_file: Path, tmp_path: Path
) -> None:
    """The second process alone hears of it, and both save one state and go on from it."""
    two = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(train_draft.__file__).parent), str(Path(__file__).parent)]!r}
import train_draft, test_train_draft
from talon.training.run import TrainingRun
if os.environ["RANK"] == "1":
    TrainingRun.train_step = test_train_draft.stop_at(4, signal.SIGTERM)
train_draft.cli.run(train_draft.main)
"""
    script = tmp_path / "two.py"
    script.write_text(two)
    done = run_on_two(script, target, data_file, tmp_path / "out", "--epochs", 20)
    assert done.returncode != 0
    assert torch.load(tmp_path / "out" / train_draft.STATE_FILE, weights_only=True)["step"] == 5


@pytest.mark.slow
def test_the_other_processes_wait_for_data_longer_than_for_each_other(
    target: Path, data_file: Path, tmp_path: Path
) -> None:
    two = f"""
import datetime, functools, os, sys, time
sys.path.insert(0, {str(Path(train_draft.__file__).parent)!r})
import torch.distributed as dist
import train_draft
patience = datetime.timedelta(seconds=5)
dist.init_process_group = functools.partial(dist.init_process_group, timeout=patience)
load_data = train_draft.load_data
def slow(*arguments):
    time.sleep(9 * (os.environ["RANK"] == "0"))
    return load_data(*arguments)
train_draft.load_data = slow
train_draft.cli.run(train_draft.main)
"""
    script = tmp_path / "two.py"
    script.write_text(two)
    done = run_on_two(script, target, data_file, tmp_path / "out", "--epochs", 1)
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_processes_share_the_work(target: Path, data_file: Path, tmp_path: Path) -> None:
    head = train_on_two(target, data_file, tmp_path)
    steps = [entry["step"] for entry in read_log(tmp_path) if "loss" in entry]
    assert steps == list(range(1, len(steps) + 1))
    assert read_checkpoint(head).source["step"] == len(steps)


@pytest.mark.slow
def test_a_sharded_target_teaches_the_same(target: Path, data_file: Path, tmp_path: Path) -> None:
    whole = train_on_two(target, data_file, tmp_path / "whole")
    sharded = train_on_two(target, data_file, tmp_path / "sharded", "--shard_target")
    # Whole, it runs by Talon's operators, sharded by torch's: they round otherwise.
    found = tensors(sharded)
    for name, wanted in tensors(whole).items():
        near = 1e-3 * float(wanted.abs().max()) if wanted.is_floating_point() else 0
        assert torch.allclose(found[name], wanted, rtol=0, atol=near), name


@HEADS
def test_acceptance_is_what_decoding_reaches(
    target: Path, data_file: Path, tmp_path: Path, family: str, capsys: pytest.CaptureFixture
) -> None:
    path = train(target, data_file, tmp_path, "--epochs", 2, "--head", family)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["What is a tree?"]}\n{"prompt": "List three colours."}\n')
    trees = ["chain:3", "dynamic:nodes=8,levels=3,top_k=3"]
    command = ("--checkpoint_path", target, "--out", tmp_path, "--evaluate", questions,
               "--trees", *trees, "--new_tokens", 24)  # fmt: skip
    assert "new_tokens: -100" in complaint(capsys, *command, "--new_tokens", -100)
    assert "the context of 256 leaves" in complaint(capsys, *command, "--new_tokens", 250)
    assert train_draft.main([str(x) for x in (*command, "--dtype", "bf16")]) == 0
    assert train_draft.main([str(x) for x in command]) == 0
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["not_the_choice_again"] == 0
    files = open_files(target, path)
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    tokenizer = load_tokenizer(target.parent)
    for result, tree in zip(report["trees"], (chain(3), dynamic_tree(8, 3, 3)), strict=True):
        rounds = emitted = 0
        for text in ("What is a tree?", "List three colours."):
            ids = tokenizer.encode_chat([{"role": "user", "content": text}])
            generation = Generation(
                Decoder(model, 200, head, tree, False), ids, SamplingConfig(), 24, frozenset({1})
            )
            list(generation)
            rounds, emitted = rounds + generation.stats.rounds, emitted + generation.stats.emitted
        assert result["rounds"] == rounds
        assert result["acceptance_length"] == round(emitted / rounds, 4)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no conversation"),
        (b"\xff\xfe\n", "UTF-8"),
        (b'{"ids": [1, 2, 3, 4], "spans": [[2, 4]]}\nnonsense\n', "line 2"),
        (b'{"messages": [{"role": "user", "content": "only a question"}]}\n', "no conversation"),
        (b"[1, 2]\n", "line 1"),
        (b"[" * 100_000, "line 1"),
    ],
)
def test_bad_data_is_one_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, says: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    assert says in complaint(capsys, *arguments(target, path, tmp_path / "o" / "p"))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--lr", 0), "lr: 0"),
        (("--max_length", 0), "max_length: 0"),
        (("--max_length", 1000), "max_length 1000"),
        (("--draft_vocab_size", 0), "draft_vocab_size 0"),
        (("--shard_target",), "torchrun"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--data", ""), "is no file"),
        (("--data", "self", "--regenerate"), "--data FILE"),
        (("--init", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--resume",), "does not exist"),
        (("--evaluate", "q.jsonl"), "--evaluate does not train: leave out --data"),
        (("--new_tokens", 64), "--evaluate is not given, which alone measures: leave out --new_"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_leaves_no_directory(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: tuple,
    says: str,
) -> None:  # fmt: skip
    fixed = ("--checkpoint_path", target, "--data", data_file, "--device", "cpu")
    assert says in complaint(capsys, *fixed, "--out", tmp_path / "o", *options)
    assert not (tmp_path / "o").exists()


def test_states_that_do_not_fit_are_refused_before_anything_is_copied(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(target, data_file, tmp_path, "--epochs", 1)
    path = tmp_path / train_draft.STATE_FILE
    good = torch.load(path, weights_only=True)
    first = next(iter(good["head"]))
    again = arguments(target, data_file, tmp_path, "--epochs", 1, "--resume")
    for broken, says in (
        (3, "not the state"),
        ({k: v for k, v in good.items() if k != "optimizers"}, "not the state"),
        (good | {"step": 0, "head": good["head"] | {"x": torch.ones(1)}}, "another head"),
        (good | {"step": 0, "head": good["head"] | {first: torch.ones(1)}}, "another head"),
        (good | {"step": 0, "optimizers": good["optimizers"][:1]}, "does not fit"),
        (good | {"step": 10**9}, "nothing is left"),
        (good, "nothing is left"),
    ):
        torch.save(broken, path)
        assert says in complaint(capsys, *again), says


def test_nan_stops_the_run_and_leaves_the_last_checkpoint(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    head = train(target, data_file, tmp_path, "--epochs", 2)
    before = head.read_bytes()
    level_loss = Unrolled.level_loss
    monkeypatch.setattr(
        Unrolled, "level_loss", lambda *a: tuple(x * float("nan") for x in level_loss(*a))
    )
    out = tmp_path / "again"
    message = complaint(capsys, *arguments(target, data_file, out, "--init", head))
    assert "not finite at step 0" in message and not (out / train_draft.HEAD_FILE).exists()
    assert head.read_bytes() == before


def test_a_full_disk_leaves_the_last_checkpoint(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Wherever in the file the room ends: torch has other errors for that than Python."""
    head = train(target, data_file, tmp_path, "--epochs", 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    size, full = (tmp_path / train_draft.STATE_FILE).stat().st_size, tmp_path / "full"
    for room in (2000, head.stat().st_size + 1000, size // 2, size - 1000, size - 10):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            message = complaint(capsys, *arguments(target, data_file, full, "--init", head))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "make room" in message and str(full) in message
        assert {path.name for path in full.iterdir()} <= {"log.jsonl", train_draft.HEAD_FILE}
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path != full}


def test_heads_and_runs_of_another_target_are_refused(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    head = train(target, data_file, tmp_path / "a", "--epochs", 1)
    other = write_target(tmp_path / "other", tiny_target(seed=1, dim=40))
    same_shape = write_target(tmp_path / "same", tiny_target(seed=2))
    init = ("--epochs", 1, "--init", head)
    assert "40" in complaint(capsys, *arguments(other, data_file, tmp_path / "b", *init))
    eagle3 = arguments(target, data_file, tmp_path / "c", *init, "--head", "eagle3")
    assert "eagle3" in complaint(capsys, *eagle3)
    again = (data_file, tmp_path / "a", "--epochs", 1)
    assert "--resume" in complaint(capsys, *arguments(target, *again))
    assert "target" in complaint(capsys, *arguments(same_shape, *again, "--resume"))
    assert "lr" in complaint(capsys, *arguments(target, *again, "--resume", "--lr", 0.5))
    path = tmp_path / "a" / train_draft.STATE_FILE
    state = torch.load(path, weights_only=True)
    state["settings"]["feature_noise"] = 0.2  # what older versions took as an option
    torch.save(state, path)
    message = complaint(capsys, *arguments(target, *again, "--resume"))
    assert "another feature_noise (0.2, now 0.5)" in message
