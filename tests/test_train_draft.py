"""The trainer learns what decoding asks of the head: same numbers, right masks, runs that can be
taken up again."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

import train_draft
from eagle_draft import DraftHead
from model import Attention, KVCache, ModelConfig, Place, Transformer, causal_mask, rope_table
from quantize import quantize_checkpoint
from talon.checkpoint import TensorSpec, read_checkpoint, write_checkpoint
from talon.decoder import Decoder, Generation
from talon.kernels.linear import Int8Linear
from talon.loading import load_head, load_target, open_files
from talon.sampling import SamplingConfig
from talon.tokenizer import load_tokenizer
from talon.training.conversations import Conversation, read_conversations, tokenise
from talon.training.head import borrow, build_head, head_config
from talon.training.losses import Batch, Settings, Teacher, Unrolled, UnrolledAttention, ahead
from talon.trees import chain, dynamic_tree

VOCAB, ROOT = 300, Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HEADS = pytest.mark.parametrize("family", ["eagle1", "eagle3"])


def tiny_config(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": VOCAB, "dim": 32, "n_layer": 7, "n_head": 4, "n_kv_head": 2, "head_dim": 8,
        "intermediate_size": 48, "norm_eps": 1e-5, "max_seq_length": 256, "eos_ids": (1,),
    }  # fmt: skip
    return ModelConfig(**(values | changes))


def tiny_target(seed: int = 0, **changes: object) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.25)
    model.norm.weight.data.uniform_(0.5, 2)
    return model.eval().requires_grad_(False)


def write_target(directory: Path, model: Transformer) -> Path:
    """A target file with a byte-level tokenizer and a chat template beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in state.items()}
    path = directory / "talon.safetensors"
    write_checkpoint(
        path, kind="target", config=asdict(model.config), specs=specs, tensors=state.items()
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|start|>": 0, "<|end|>": 1} | {piece: i + 2 for i, piece in enumerate(alphabet)}
    tokenizer = JsonTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def settings(family: str, **changes: object) -> Settings:
    values = {
        "head": family, "epochs": 1, "batch_tokens": 64, "lr": 3e-3, "warmup": 0.04, "unroll": 3,
        "unroll_from": 0.0, "level_decay": 0.8, "feature_weight": 1.0, "feature_noise": 0.0,
        "draft_vocab_size": 200, "max_length": 64, "validation": 0.0, "dtype": "fp32", "seed": 0,
        "init": None,
    }  # fmt: skip
    return Settings(**(values | changes))


def random_data(rows: int, seed: int = 0, longest: int = 40) -> list[Conversation]:
    generator = torch.Generator().manual_seed(seed)
    data = []
    for row in range(rows):
        length = longest - 5 * (row % 4)
        data.append(
            Conversation(
                torch.randint(2, 200, (length,), generator=generator).tolist(), [(6, length)]
            )
        )
    return data


def unrolled_of(model: Transformer, family: str, **changes: object) -> Unrolled:
    s = settings(family, **changes)
    config = head_config(model.config, s)
    ids = torch.arange(config.draft_vocab_size) + 3
    head = build_head(config, model, ids, s)
    with torch.no_grad():
        for parameter in head.layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return Unrolled(head, borrow(head, model), s)


def batch_of(model: Transformer, family: str, data: list[Conversation]) -> Batch:
    layers = head_config(model.config, settings(family)).feature_layers
    return Teacher(model, family, layers, 64, 0).batch(list(range(len(data))), data)


def test_a_guess_is_counted_where_its_own_label_is_an_answer_token() -> None:
    # Two conversations of five tokens; answers at 2..4 and at 3..4. By hand: entry i at level s
    # reads token i+1+s, guesses token i+2+s, and counts if that one is an answer token.
    answer = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
    ids = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    batch = Batch(ids, answer, [], torch.empty(0), torch.empty(0))
    assert batch.counted(0).int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]
    assert batch.counted(1).int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.counted(2).int().tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert ahead(ids, 1).tolist() == [[11, 12, 13, 14, 0], [21, 22, 23, 24, 0]]
    assert ahead(ids, 2)[batch.counted(0)].tolist() == [12, 13, 14, 23, 24]
    assert ahead(ids, 2)[0, 0] == 12 and ahead(ids, 3)[batch.counted(1)].tolist() == [
        13,
        14,
        23,
        24,
    ]


@HEADS
def test_a_padded_batch_has_the_losses_of_its_rows_alone(family: str) -> None:
    model, data = tiny_target(), random_data(3)
    unrolled = unrolled_of(model, family)
    _, together = unrolled(batch_of(model, family, data), 3)
    alone = [unrolled(batch_of(model, family, [row]), 3)[1] for row in data]
    assert torch.equal(together[:, :2], sum(table[:, :2] for table in alone))
    if (
        family == "eagle1"
    ):  # a mean over entries; cross-entropies are means over those inside the draft vocabulary
        expected = sum(t[:, 3] * t[:, 0] for t in alone) / sum(t[:, 0] for t in alone)
        torch.testing.assert_close(together[:, 3], expected)


@HEADS
def test_unrolled_levels_give_the_logits_that_decoding_gives(family: str) -> None:
    """Three levels down the true text from every position: the trainer's numbers against the head's
    own cache."""
    model, (row,) = tiny_target(), random_data(1, longest=20)
    unrolled = unrolled_of(model, family)
    batch = batch_of(model, family, [row])
    with torch.no_grad():
        trained = [unrolled.head.logits(hidden) for hidden in unrolled.levels(batch, 3)]
    head, c = unrolled.head, unrolled.head.config
    head.layer.attention = plain_attention(head)
    kv = KVCache(1, c.n_kv_head, 32, c.head_dim, torch.float32)
    table = rope_table(32, c.head_dim, c.rope_theta, c.rope_scaling)
    ids, slots, start = torch.tensor(row.ids), torch.arange(32), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        fused = head.fuse([x[0] for x in batch.features])
        for entry in range(15):
            rows = torch.arange(entry + 1)
            hidden = head(
                ids[1 : entry + 2],
                fused[: entry + 1],
                Place(table[:, rows], rows, causal_mask(start, entry + 1, slots)),
                kv.layer(0),
            )[-1:]
            torch.testing.assert_close(
                head.logits(hidden)[0], trained[0][entry], atol=1e-4, rtol=1e-4
            )
            for level in (1, 2):
                at = torch.tensor([entry + level])
                place = Place(table[:, at], at, slots[None] <= at[:, None])
                hidden = head(ids[at + 1], hidden, place, kv.layer(0))
                torch.testing.assert_close(
                    head.logits(hidden)[0], trained[level][entry], atol=1e-4, rtol=1e-4
                )


def plain_attention(head: DraftHead) -> Attention:
    c, old = head.config, head.layer.attention
    new = Attention(c, old.wqkv.in_features)
    new.load_state_dict(old.state_dict())
    return new


@HEADS
def test_the_teacher_reads_what_decoding_reads(family: str) -> None:
    model, (row,) = tiny_target(), random_data(1)
    batch = batch_of(model, family, [row])
    x, streams = model.tok_embeddings(torch.tensor(row.ids)), []
    kv = KVCache(7, 2, 64, 8, torch.float32)
    n = len(row.ids)
    table = rope_table(64, 8, 10000.0, None)[:, :n]
    mask = causal_mask(torch.zeros(1, dtype=torch.int64), n, torch.arange(n))
    for i, layer in enumerate(model.layers):
        streams.append(x)
        x = layer(x, Place(table, torch.arange(n), mask), kv.layer(i))
    final = model.norm(x)
    wanted = [final] if family == "eagle1" else [streams[2], streams[3], streams[4]]
    for mine, right in zip(batch.features, wanted, strict=True):
        torch.testing.assert_close(mine[0], right)
    assert torch.equal(batch.choice[0], F.linear(final, model.output.weight).argmax(-1))


@HEADS
def test_one_batch_can_be_learnt_by_heart(family: str, tmp_path: Path) -> None:
    model, data = tiny_target(), random_data(4, longest=30)
    s = settings(family, epochs=250, batch_tokens=1000, draft_vocab_size=VOCAB, unroll=1, lr=3e-2)
    head = build_head(head_config(model.config, s), model, torch.arange(VOCAB), s)
    run = train_draft.Run(model, head, data, s, tmp_path, {"target": "t"}, 2**20)
    best = max(run.train_step()["accuracy"][0] for _ in range(run.total))
    assert best >= 0.99


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), tiny_target())


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"ids": row.ids, "spans": row.spans} for row in random_data(40, seed=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(
    target: Path, data: Path | str, out: Path, *options: object, family: str = "eagle1"
) -> Path:
    fixed = [
        "--checkpoint_path",
        target,
        "--head",
        family,
        "--data",
        data,
        "--out",
        out,
        "--device",
        "cpu",
    ]
    small = [
        "--draft_vocab_size",
        200,
        "--batch_tokens",
        200,
        "--max_length",
        128,
        "--log_every",
        1,
    ]
    assert train_draft.main([str(x) for x in [*fixed, *small, *options]]) == 0
    return out / train_draft.HEAD_FILE


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(path).tensors())


def same_tensors(a: Path, b: Path) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@HEADS
def test_data_training_and_decoding_end_to_end(target: Path, tmp_path: Path, family: str) -> None:
    """The target talks to itself, a head is trained, generate.py's loader takes it, and the text
    does not change."""
    made = ["--answer_tokens", 600, "--data_batch", 8, "--epochs", 3]
    path = train(target, "self", tmp_path, *made, family=family)
    rows = [json.loads(line) for line in (tmp_path / "self.jsonl").read_text().splitlines()]
    assert sum(end - start for row in rows for start, end in row["spans"]) >= 600
    assert len({tuple(row["ids"]) for row in rows}) == len(rows)
    files = open_files(target, path)
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    prompt = rows[0]["ids"][: rows[0]["spans"][0][0]]
    texts = []
    for arguments in ((), (head, chain(3)), (head, dynamic_tree(nodes=9, levels=3, top_k=3))):
        decoder = Decoder(model, 200, *arguments, compile=False)
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
    path = train(quantised, "self", tmp_path / "out", *made, family=family)
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
    path = train(target, data_file, tmp_path / "run", "--epochs", 2, family=family)
    names = set(read_checkpoint(path).specs)
    assert ("output.weight" in names, "tok_embeddings.weight" in names) == (
        family == "eagle3",
        False,
    )
    files = open_files(target, path)
    model = load_target(files, torch.device("cpu"), torch.float32)
    head = load_head(files, model, torch.device("cpu"), torch.float32)
    state = torch.load(tmp_path / "run" / train_draft.STATE_FILE, weights_only=True)
    assert state["step"] > 0 and not torch.equal(
        state["head"]["fc.parametrizations.weight.original"], head.fc.weight
    )
    batch = batch_of(model, family, random_data(1))
    unrolled = Unrolled(head, head.output.weight, settings(family))
    new = UnrolledAttention.__new__(UnrolledAttention)
    new.__dict__ = head.layer.attention.__dict__
    head.layer.attention = new
    with torch.no_grad():
        _, table = unrolled(batch, 3)
    assert torch.isfinite(table).all() and table[0, 0] == 34


@HEADS
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    target: Path, data_file: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--epochs", 4, "--validate_every", 3]
    whole = train(target, data_file, tmp_path / "whole", *options, family=family)
    steps = train_draft.Run.train_step

    def interrupted(run: train_draft.Run) -> dict:
        if run.step == 7:
            run.stopping = True  # what Ctrl-C does
        return steps(run)

    monkeypatch.setattr(train_draft.Run, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(target, data_file, tmp_path / "half", *options, family=family)
    monkeypatch.undo()
    half = train(target, data_file, tmp_path / "half", *options, "--resume", family=family)
    assert same_tensors(whole, half)
    logs = [
        [
            {k: v for k, v in json.loads(line).items() if k != "cpu_s"}
            for line in (d / "log.jsonl").read_text().splitlines()
        ]
        for d in (whole.parent, half.parent)
    ]
    assert logs[0] == logs[1]


def test_going_on_from_a_head_starts_where_it_ended(
    target: Path, data_file: Path, tmp_path: Path
) -> None:
    first = train(target, data_file, tmp_path / "first", "--epochs", 2)
    second = train(
        target, data_file, tmp_path / "second", "--epochs", 1, "--lr", 1e-9, "--init", first
    )
    for name, value in tensors(first).items():
        torch.testing.assert_close(tensors(second)[name], value)


def train_on_two(target: Path, data_file: Path, out: Path, *more: str) -> Path:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(ROOT / "train_draft.py"), "--checkpoint_path", str(target), "--data", str(data_file),
        "--out", str(out), "--device", "cpu", "--draft_vocab_size", "200",
        "--batch_tokens", "200", "--max_length", "128", "--epochs", "2", "--log_every", "1", *more,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out / train_draft.HEAD_FILE


def test_two_processes_share_the_work(target: Path, data_file: Path, tmp_path: Path) -> None:
    head = train_on_two(target, data_file, tmp_path)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in log if "loss" in entry]
    assert steps == list(range(1, len(steps) + 1))
    assert read_checkpoint(head).source["step"] == len(steps)


def test_a_sharded_target_teaches_the_same(target: Path, data_file: Path, tmp_path: Path) -> None:
    whole = train_on_two(target, data_file, tmp_path / "whole", "--cache_gib", "0")
    sharded = train_on_two(target, data_file, tmp_path / "sharded", "--shard_target")
    assert same_tensors(whole, sharded)


@HEADS
def test_acceptance_is_what_decoding_reaches(
    target: Path, data_file: Path, tmp_path: Path, family: str, capsys: pytest.CaptureFixture
) -> None:
    path = train(target, data_file, tmp_path, "--epochs", 2, family=family)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["What is a tree?"]}\n{"prompt": "List three colours."}\n')
    trees = ["chain:3", "dynamic:nodes=8,levels=3,top_k=3"]
    command = [
        "--checkpoint_path",
        target,
        "--out",
        tmp_path,
        "--evaluate",
        questions,
        "--new_tokens",
        24,
        "--trees",
        *trees,
    ]
    assert "new_tokens -100" in complaint(capsys, *command, "--new_tokens", -100)
    assert "the context of 256 leaves" in complaint(capsys, *command, "--new_tokens", 250)
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
        assert (result["rounds"], result["acceptance_length"]) == (
            rounds,
            round(emitted / rounds, 4),
        )


# --- data -----------------------------------------------------------------------------------------


def test_answers_are_found_through_the_template(target: Path) -> None:
    tokenizer = load_tokenizer(target.parent)
    messages = [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": " Goodbye. "},
    ]  # fmt: skip
    row = tokenise(messages, tokenizer, (1,))
    assert isinstance(row, Conversation)
    assert [tokenizer.decode(row.ids[a:b], skip_special=False) for a, b in row.spans] == [
        "Hello.<|end|>",
        " Goodbye.",
    ]
    assert row.ids[: row.spans[0][0]] == tokenizer.encode_chat(messages[:2])


def test_unusable_rows_are_counted_by_reason(target: Path, tmp_path: Path) -> None:
    path, turn = tmp_path / "d.jsonl", {"from": "human", "value": "Hi"}
    rows = [
        {"conversations": [turn, {"from": "gpt", "value": "Hello"}]},
        {
            "conversations": [
                {"from": "gpt", "value": "Again"},
                turn,
                {"from": "gpt", "value": "Hello"},
            ]
        },
        {"conversations": [turn]},
        {"conversations": []},
        {"conversations": [turn, {"from": "narrator", "value": "Hello"}]},
        {"conversations": [turn, {"from": "gpt", "value": "Hello " * 50}]},
        {"conversations": [turn, {"from": "gpt", "value": "  "}]},
        {"ids": [5, 6, 7, VOCAB], "spans": [[2, 4]]},
        {"ids": [5], "spans": [[0, 1]]},
        {"ids": [5, 6, 7], "spans": [[2, 3]]},
        {"text": "x"},
        {"ids": ["a", "b"], "spans": [[0, 2]]},
        {"ids": [1.5, 2, 3, 4], "spans": [[2, 4]]},
        {"ids": [True, 2, 3, 4], "spans": [[2, 4]]},
        {"ids": None, "spans": [[2, 4]]},
        {"ids": [1, 2, 3, 4]},
        {"ids": [1, 2, 3, 4], "spans": [1]},
        {"ids": [1, 2, 3, 4], "spans": [["a", "b"]]},
        {"ids": [1, 2, 3, 4], "spans": [[1, 2, 3]]},
        {"messages": [{"role": ["user"], "content": "x"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, skipped = read_conversations(path, load_tokenizer(target.parent), tiny_config(), 60)
    assert len(kept) == 3 and skipped["no answer"] == 3 and skipped["longer than 60 tokens"] == 1
    assert skipped["unknown role"] == 2 and skipped["ids outside the vocabulary"] == 1
    assert skipped["ids that are no list of whole numbers"] == 4
    assert skipped["spans that are no list of [start, end]"] == 4
    assert sum(skipped.values()) == len(rows) - len(kept)


def test_an_interrupted_data_file_is_taken_up_again(target: Path, tmp_path: Path) -> None:
    train(target, "self", tmp_path / "a", "--answer_tokens", 200, "--data_batch", 4, "--epochs", 1)
    made = tmp_path / "a" / "self.jsonl"
    kept = made.read_text()
    out = tmp_path / "b"
    out.mkdir()
    (out / "self.jsonl").write_text(kept + kept[:40])
    train(target, "self", out, "--answer_tokens", 500, "--data_batch", 4, "--epochs", 1)
    again = (out / "self.jsonl").read_text()
    assert again.startswith(kept) and len(again) > len(kept)
    numbers = [json.loads(line)["number"] for line in again.splitlines()]
    assert len(set(numbers)) == len(numbers)


def test_regenerated_answers_belong_to_the_turns_of_the_file_as_it_is_now(
    target: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "turns.jsonl", tmp_path / "o"
    tokenizer = load_tokenizer(target.parent)

    def regenerate(word: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        """The file that is made, the prompts in it and those it was to answer."""
        turns = [[{"role": "user", "content": f"What is a {word} {i}?"}] for i in range(12)]
        answered = [[*turn, {"role": "assistant", "content": "?"}] for turn in turns]
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in answered))
        train(target, path, out, "--regenerate", "--data_batch", 4, "--epochs", 1)
        made = max(out.glob("regenerated_*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
        rows = [json.loads(line) for line in made.read_text().splitlines()]
        asked = [row["ids"][: row["spans"][0][0]] for row in rows]
        return made, asked, [tokenizer.encode_chat(turn) for turn in turns]

    first, asked, prompts = regenerate("tree")
    assert asked and all(ids in prompts for ids in asked)
    (out / train_draft.STATE_FILE).unlink()
    second, asked, prompts = regenerate("rock")
    assert asked and all(ids in prompts for ids in asked) and second != first


# --- mistakes -------------------------------------------------------------------------------------


def complaint(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """Run the command as a user does: exit code 2 and one line."""
    with pytest.raises(SystemExit) as stopped:
        train_draft.cli.run(lambda: train_draft.main([str(x) for x in arguments]))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stopped.value.code == 2 and len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no conversation"),
        (b"\xff\xfe\n", "line 1"),
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
    assert says in complaint(
        capsys,
        "--checkpoint_path",
        target,
        "--data",
        path,
        "--out",
        tmp_path / "o",
        "--device",
        "cpu",
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--lr", 0), "lr 0"),
        (("--max_length", 0), "max_length 0"),
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
    again = ("--checkpoint_path", target, "--data", data_file, "--out", tmp_path, "--device", "cpu",
             "--draft_vocab_size", 200, "--batch_tokens", 200, "--max_length", 128, "--epochs", 1,
             "--resume")  # fmt: skip
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
    target: Path,
    data_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = train(target, data_file, tmp_path, "--epochs", 2)
    before = head.read_bytes()
    level_loss = Unrolled.level_loss
    monkeypatch.setattr(
        Unrolled, "level_loss", lambda *a: tuple(x * float("nan") for x in level_loss(*a))
    )
    out = tmp_path / "again"
    message = complaint(
        capsys, "--checkpoint_path", target, "--data", data_file, "--out", out, "--init", head,
        "--max_length", 128, "--device", "cpu",
    )  # fmt: skip
    assert "not finite at step 0" in message and not (out / train_draft.HEAD_FILE).exists()
    assert head.read_bytes() == before


def test_a_full_disk_leaves_the_last_checkpoint(
    target: Path,
    data_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    head = train(target, data_file, tmp_path, "--epochs", 1)
    before = sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir())
    monkeypatch.setattr(torch, "save", full)
    run = ["--checkpoint_path", target, "--data", data_file, "--max_length", 128, "--device", "cpu"]
    assert "No space left" in complaint(capsys, *run, "--out", tmp_path / "full", "--init", head)
    assert not list((tmp_path / "full").glob("*.pt")) and not list((tmp_path / "full").glob(".*"))
    assert before == sorted(
        (path.name, path.stat().st_size) for path in tmp_path.iterdir() if path.is_file()
    )


def test_heads_and_runs_of_another_target_are_refused(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    head = train(target, data_file, tmp_path / "a", "--epochs", 1)
    other = write_target(tmp_path / "other", tiny_target(seed=1, dim=40))
    same_shape = write_target(tmp_path / "same", tiny_target(seed=2))
    run = [
        "--data",
        data_file,
        "--device",
        "cpu",
        "--draft_vocab_size",
        200,
        "--batch_tokens",
        200,
        "--max_length",
        128,
    ]
    assert "40" in complaint(
        capsys, *run, "--checkpoint_path", other, "--out", tmp_path / "b", "--init", head
    )
    resume = [*run, "--out", tmp_path / "a", "--resume", "--epochs", 1]
    assert "target" in complaint(capsys, *resume, "--checkpoint_path", same_shape)
    assert "another lr" in complaint(capsys, *resume, "--checkpoint_path", target, "--lr", 0.5)
    assert "--resume" in complaint(
        capsys, *run, "--checkpoint_path", target, "--out", tmp_path / "a"
    )
    assert "eagle3" in complaint(
        capsys,
        *run,
        "--checkpoint_path",
        target,
        "--out",
        tmp_path / "c",
        "--init",
        head,
        "--head",
        "eagle3",
    )
