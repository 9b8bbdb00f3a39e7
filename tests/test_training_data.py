"""The data of training: conversations of a file, and those that the target makes itself."""

import json
from pathlib import Path

import pytest
from tiny_training import VOCAB, tiny_config, tiny_target, train, write_lines, write_target

import train_draft
from talon.tokenizer import load_tokenizer
from talon.training.conversations import Conversation, read_conversations, tokenise


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), tiny_target())


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


def test_unusable_rows_are_counted_by_reason(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    turn = {"from": "human", "value": "Hi"}
    rows = [
        {"conversations": [turn, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "gpt", "value": "x"}, turn, {"from": "gpt", "value": "y"}]},
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
    path, tokenizer = write_lines(tmp_path / "d.jsonl", rows), load_tokenizer(target.parent)
    assert len(read_conversations(path, tokenizer, tiny_config(), 60)) == 3
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        "skipped 1 of 20 conversations: ids outside the vocabulary",
        "skipped 1 of 20 conversations: longer than 60 tokens",
        "skipped 1 of 20 conversations: neither messages nor conversations",
        "skipped 1 of 20 conversations: the template rewrites earlier turns, or an answer is empty",
        "skipped 2 of 20 conversations: unknown role",
        "skipped 3 of 20 conversations: no answer",
        "skipped 4 of 20 conversations: ids that are no list of whole numbers",
        "skipped 4 of 20 conversations: spans that are no list of [start, end]",
    ]


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
        write_lines(path, [{"messages": row} for row in answered])
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
