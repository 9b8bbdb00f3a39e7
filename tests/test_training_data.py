"""The data of training: conversations of a file, and those that the target makes itself."""

import itertools
import json
import re
import shutil
from collections import Counter, deque
from pathlib import Path

import pytest
import torch
from tiny_training import (
    LLAMA2,
    TEMPLATE,
    THINKING,
    VOCAB,
    ZEPHYR,
    arguments,
    complaint,
    random_data,
    tiny_config,
    tiny_target,
    train,
    write_lines,
    write_spaced_tokenizer,
    write_target,
)

import train_draft
from talon.tokenizer import Tokenizer, load_tokenizer
from talon.training import batched
from talon.training.batched import BatchedDecoder, Slot, fit_batch
from talon.training.conversations import (
    Conversation,
    read_conversations,
    read_messages,
    tokenise,
)
from talon.training.evaluation import answer_greedily
from talon.training.self_talk import SelfTalk, TalkConfig, make_conversations


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), tiny_target())


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"ids": row.ids, "spans": row.spans} for row in random_data(10)]
    return write_lines(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def talk(*turns: str) -> list[dict]:
    """Turns of user and assistant, one after the other."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]


def answers(row: Conversation, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(row.ids[a:b], skip_special=False) for a, b in row.spans]


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    """The tiny target's tokenizer with another template."""
    write_target(directory, tiny_target(), template)
    return load_tokenizer(directory)


def test_answers_are_found_through_the_template(target: Path) -> None:
    tokenizer = load_tokenizer(target.parent)
    messages = [{"role": "system", "content": "Be short."}, *talk("Hi", "Hello.", "Bye", " Bye. ")]
    (row,) = tokenise(messages, tokenizer, (1,))
    assert answers(row, tokenizer) == ["Hello.<|end|>", " Bye. <|end|>"]
    assert row.ids[: row.spans[0][0]] == tokenizer.encode_chat(messages[:2])


@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR])
@pytest.mark.parametrize("form", ["model", "json"])
def test_training_sees_the_ids_that_decoding_sees(tmp_path: Path, form: str, template: str) -> None:
    """A sentencepiece begins every text with a space of its own: the whole conversation is one."""
    write_spaced_tokenizer(tmp_path, form, template)
    tokenizer = load_tokenizer(tmp_path)
    messages = talk("the user is", "yes ", "and the answer", "there", "yes", "the")
    end = tokenizer.token_id("</s>")
    (row,) = tokenise(messages, tokenizer, (end,))
    text = tokenizer.render_chat(messages).rpartition("</s>")[0] + "</s>"
    assert row.ids == tokenizer.encode(text, add_bos=False)
    for turn, (start, stop) in zip((1, 3, 5), row.spans, strict=True):
        assert row.ids[:start] == tokenizer.encode_chat(messages[:turn])
        # What decoding has to produce until it ends the turn.
        answer = tokenizer.decode(row.ids[start:stop])
        assert answer.split() == messages[turn]["content"].split()
        assert row.ids[stop - 1] == end and end not in row.ids[start : stop - 1]


def test_a_template_that_opens_and_drops_the_reasoning_is_trained_on(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, THINKING)
    reasons, plain = "<think>\nSo yes, 1.\n</think>\n\nyes", "no"
    (row,) = tokenise(talk("a", plain, "b", plain), tokenizer, (1,))
    assert answers(row, tokenizer) == ["no<|end|>", "no<|end|>"]
    assert row.ids == tokenizer.encode("<|start|>a<|start|>:no<|end|><|start|>b<|start|>:no<|end|>")
    first, second = tokenise(talk("a", reasons, "b", plain), tokenizer, (1,))
    assert answers(first, tokenizer) == ["So yes, 1.\n</think>\n\nyes<|end|>"]
    assert first.ids[: first.spans[0][0]] == tokenizer.encode_chat(talk("a"))
    # Decoding would see the first answer without its reasoning.
    assert answers(second, tokenizer) == ["no<|end|>"]
    seen = "<|start|>a<|start|>:\n\nyes<|end|><|start|>b<|start|>:no<|end|>"
    assert second.ids == tokenizer.encode(seen)


def test_a_template_that_keeps_the_reasoning_has_it_in_the_answer(target: Path) -> None:
    tokenizer = load_tokenizer(target.parent)
    (row,) = tokenise(talk("a", "<think>yes</think>yes", "b", "no"), tokenizer, (1,))
    assert answers(row, tokenizer) == ["<think>yes</think>yes<|end|>", "no<|end|>"]


def test_a_row_that_the_template_refuses_is_skipped_and_the_others_are_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_target(tmp_path, tiny_target(), LLAMA2)
    good = [{"messages": talk("Hi", f"Answer {n}")} for n in range(4)]
    bad = {"messages": [*talk("Hi"), *talk("Hi", "Hello")]}
    path = write_lines(tmp_path / "d.jsonl", [*good, bad])
    rows = read_conversations(path, load_tokenizer(tmp_path), tiny_config(), 60)
    assert len(rows) == 4
    assert capsys.readouterr().err == "skipped 1 of 5 conversations: the template refuses it\n"
    train(tmp_path / "talon.safetensors", path, tmp_path / "a", "--epochs", 1)
    regenerate = ("--regenerate", "--data_batch", 2, "--answer_tokens", 8, "--epochs", 1)
    train(tmp_path / "talon.safetensors", path, tmp_path / "b", *regenerate)


def test_a_target_without_a_default_template_is_told_what_it_can_take(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for path in target.parent.iterdir():
        shutil.copy(path, tmp_path)
    named = {"chat_template": [{"name": "rag", "template": TEMPLATE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    path = write_lines(tmp_path / "d.jsonl", [{"messages": talk("Hi", "Hello")}])
    for data in (path, "self"):
        message = complaint(capsys, *arguments(tmp_path / target.name, data, tmp_path / "o"))
        assert "default template" in message and "ids and spans" in message
        assert "no_chat" not in message


def test_questions_that_the_template_refuses_are_told_what_can_be_done(
    target: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Advice for another command names that command."""
    refusing = "{{ raise_exception('a system message first') if messages[0].role == 'user' }}"
    path = write_target(tmp_path, tiny_target(), refusing)
    train(path, data_file, tmp_path / "o", "--epochs", 1)
    questions = write_lines(tmp_path / "q.jsonl", [{"turns": ["Hi"]}])
    measuring = ("--checkpoint_path", path, "--out", tmp_path / "o", "--evaluate", questions)
    assert "generate.py: --no_chat" in complaint(capsys, *measuring, "--device", "cpu")
    message = complaint(capsys, *arguments(path, "self", tmp_path / "p"))
    assert "give --data FILE" in message and "no_chat" not in message


def test_turns_in_parts_are_text_and_what_is_not_text_is_skipped_as_such() -> None:
    def text(value: str) -> dict:
        return {"type": "text", "text": value}

    asked, image = {"role": "user", "content": "Hi"}, {"type": "image_url", "image_url": {}}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    for line, expected in (
        ({"messages": [{"role": "user", "content": [text("H"), text("i")]}]}, [asked]),
        ({"messages": None, "conversations": [{"from": "human", "value": "Hi"}]}, [asked]),
        ({"messages": [asked, called]}, "a turn that is not text"),
        (
            {"messages": [{"role": "user", "content": [text("H"), image]}]},
            "a turn that is not text",
        ),
        ({"messages": [asked, {"role": "tool", "content": "5"}]}, "unknown role"),
        ({"messages": None}, "neither messages nor conversations"),
    ):
        assert read_messages(line) == expected


@pytest.mark.parametrize("form", ["model", "json"])
def test_prompts_of_self_talk_are_those_that_decoding_would_see(tmp_path: Path, form: str) -> None:
    """Also where the target has sampled the user's turn itself, token by token."""
    write_spaced_tokenizer(tmp_path, form, LLAMA2)
    tokenizer = load_tokenizer(tmp_path)
    model = tiny_target(vocab_size=tokenizer.vocab_size, eos_ids=(tokenizer.token_id("</s>"),))
    model.output.weight[model.config.eos_ids[0]] *= 2  # turns that end
    path = make_conversations(model, tokenizer, TalkConfig(1500, batch=8), tmp_path)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids = row["ids"][: row["spans"][0][0]]
        turn = tokenizer.decode(ids).removeprefix("[INST] ").removesuffix(" [/INST]")
        assert ids == tokenizer.encode_chat(talk(turn))


@pytest.fixture
def talk_in_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SelfTalk:
    """A tiny target that says small letters and ends its turns, so that all it says is text."""
    model = tiny_target(3)
    write_target(tmp_path, model)
    tokenizer, forward = load_tokenizer(tmp_path), BatchedDecoder.forward
    letters = [1, *(tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz")]
    others = torch.tensor([i for i in range(VOCAB) if i not in letters])

    def say_letters(*inputs: object) -> torch.Tensor:
        logits = forward(*inputs).index_fill(1, others, float("-inf"))
        logits[:, 1] += logits[:, letters].std(1) * 0.7
        return logits

    monkeypatch.setattr(BatchedDecoder, "forward", say_letters)
    return SelfTalk(model, tokenizer, TalkConfig(3000, batch=24))


def test_system_prompts_and_second_turns_are_what_decoding_would_see(
    talk_in_letters: SelfTalk,
) -> None:
    tokenizer, seen = talk_in_letters.tokenizer, Counter()
    for row in itertools.islice(talk_in_letters.run(0), 100):
        text = tokenizer.decode(row["ids"], skip_special=False)
        messages = [
            {"role": role, "content": content}
            for role, content in re.findall(r"<\|start\|>(\w+)\n(.*?)(?:<\|end\|>|$)", text, re.S)
        ]
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(answers) == len(row["spans"])
        for index, (start, end) in zip(answers, row["spans"], strict=True):
            assert row["ids"][:start] == tokenizer.encode_chat(messages[:index])
            said = tokenizer.decode(row["ids"][start:end])
            assert said == messages[index]["content"]
        assert row["spans"][-1][1] == len(row["ids"]) <= 448
        seen[messages[0]["role"], len(answers)] += 1
    assert seen.keys() == {("system", 1), ("system", 2), ("user", 1), ("user", 2)}


def test_an_answer_that_loops_is_dropped_and_what_came_before_it_is_kept(
    talk_in_letters: SelfTalk,
) -> None:
    def answer(spans: list[list[int]]) -> dict | None:
        slot, done = Slot(0, deque(), start=9, ids=list(range(2, 11)), spans=spans), None
        for number in range(80):
            assert done is None
            done = talk_in_letters.advance(slot, 20 + number % 5)
            if done is not None:
                return done
        return None

    assert answer([]) == {}
    kept = answer([[3, 6]])
    assert kept["ids"] == [2, 3, 4, 5, 6, 7] and kept["spans"] == [[3, 6]]


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
        "skipped 1 of 20 conversations: the template changes an answer, or it is empty",
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


def test_texts_at_a_time_are_as_many_as_the_memory_has_room_for(
    capsys: pytest.CaptureFixture,
) -> None:
    # LLaMA-2-7B in 16 bit: 512 KB of keys and values a token, on a card that holds 24 GB.
    config = tiny_config(
        dim=4096, n_layer=32, n_head=32, n_kv_head=32, head_dim=128, vocab_size=32000
    )
    each = 352 * 2**19
    for available, low, high in ((None, 128, 128), (40 * 10**9, 128, 128), (10**10, 40, 48)):
        batch = fit_batch(config, 352, 128, torch.bfloat16, available)
        assert low <= batch <= high and (available is None or batch * each < available)
    assert f"memory for {batch} texts at a time instead of 128" in capsys.readouterr().err
    with pytest.raises(ValueError, match="0.10 GB free"):
        fit_batch(config, 352, 128, torch.bfloat16, 10**8)


@pytest.mark.parametrize("room", [1, 3])
def test_questions_wait_for_a_row_where_memory_is_short(
    target: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    model = tiny_target()
    prompts = [[3, 7, 9], [5, 6], [4] * 9, [8, 2]]
    whole = answer_greedily(model, prompts, 12)
    monkeypatch.setattr(batched, "fit_batch", lambda *_: room)
    assert answer_greedily(model, prompts, 12) == whole
