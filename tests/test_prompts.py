"""Question files: what is read, what is refused by its line, and the sets that ship."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import random_model

import benchmark
from talon.loading import Files
from talon.prompts import (
    BUILT_IN,
    TUNING,
    Question,
    encode_question,
    made_up_prompts,
    read_lines,
    read_questions,
    spread,
    tuning_prompts,
)

GOOD = '{"question_id": 1, "category": "a", "turns": ["Hello", "And then?"]}'
CONFIG = random_model().config


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"category": "a"}', "at least one text"),
        ('{"prompt": ["x"]}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": []}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": "x"}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": [5]}', "at least one text"),
        ('{"question_id": 1, "category": "a", "turns": ["  "]}', "first turn is empty"),
        ('{"question_id": null, "category": "a", "turns": ["x"]}', "question_id must be"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, problem):
    questions, problems = read_questions(write_lines(tmp_path / "q.jsonl", GOOD, "", line, GOOD))
    assert [q.line for q in questions] == [1, 4] and questions[0].text == "Hello"
    assert len(problems) == 1 and "line 3" in problems[0] and problem in problems[0]


def test_a_question_needs_no_more_than_its_text(tmp_path):
    lines = ('{"turns": ["one", "two"]}', '{"prompt": "three"}')
    questions, problems = read_questions(write_lines(tmp_path / "q.jsonl", *lines))
    wanted = [Question(1, 1, "", "one", ("two",)), Question(2, 2, "", "three")]
    assert questions == wanted and not problems


def test_unreadable_question_files_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        read_questions(write_lines(tmp_path / "e.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    for reader in (read_questions, read_lines):
        with pytest.raises(ValueError, match="UTF-8"):
            reader(tmp_path / "b.jsonl")
    with pytest.raises(OSError):
        read_questions(tmp_path / "absent.jsonl")


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_file(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n{GOOD}\r\n".encode())
    questions, problems = read_questions(tmp_path / "q.jsonl")
    assert len(questions) == 2 and not problems
    assert read_lines(tmp_path / "q.jsonl") == [json.loads(GOOD)] * 2


def test_a_line_ends_at_line_feeds_only(tmp_path):
    """JSON allows other separators of Unicode inside a text."""
    text = "one\u2028two\u0085three"
    row = json.dumps({"question_id": 1, "category": "a", "turns": [text]}, ensure_ascii=False)
    questions, problems = read_questions(write_lines(tmp_path / "q.jsonl", row))
    assert [q.text for q in questions] == [text] and not problems


# ---------------------------------------------------------------- prompts for the benchmark


class Words:
    """A tokenizer stand-in: one id a word."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())

    def encode_chat(self, messages: list[dict]) -> list[int]:
        return [0, *self.encode(messages[0]["content"])]


def prompts_from(*flags: str, context: int = 128) -> tuple[list[list[int]], list[str]]:
    args = benchmark.parse_args(["--max_new_tokens", "10", *flags])
    files = Files(None, replace(CONFIG, max_seq_length=context), Words())
    return benchmark.read_prompts(args, files)


def test_bad_and_too_long_questions_are_refused_or_skipped_as_the_flag_says(tmp_path, capsys):
    long = json.dumps({"question_id": 2, "category": "b", "turns": ["word " * 600]})
    for bad, said in (
        ("{", "line 2: not JSON"),
        (long, "line 2: 601 tokens and 10 new ones do not fit"),
    ):
        path = str(write_lines(tmp_path / "q.jsonl", GOOD, bad))
        with pytest.raises(ValueError, match=f"{said}.*--bad_questions skip"):
            prompts_from("--questions", path)
        prompts, _, skipped = prompts_from("--questions", path, "--bad_questions", "skip")
        assert prompts == [[0, 1]] and len(skipped) == 1
        assert said in capsys.readouterr().err
    path = str(write_lines(tmp_path / "q.jsonl", "{"))
    with pytest.raises(ValueError, match="no usable question"):
        prompts_from("--questions", path, "--bad_questions", "skip")


def test_prompts_of_our_own_that_a_small_context_cannot_hold_are_left_out(capsys):
    every, _, skipped = prompts_from(context=10_000)
    assert len(every) == 32 and not skipped
    some, questions, skipped = prompts_from(context=60)
    assert some == [ids for ids in every if len(ids) <= 50] and 0 < len(some) < 32
    assert len(questions) == len(some)
    assert len(skipped) == 32 - len(some)
    assert "do not fit into the context of 60" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--max_new_tokens") as caught:
        prompts_from(context=12)
    assert "repair" not in str(caught.value)


def test_prompts_without_a_tokenizer_stay_inside_vocabulary_and_length():
    prompts = made_up_prompts(50, 3, 10)
    assert len(prompts) == 3 and max(map(len, prompts)) <= 10
    assert all(0 <= i < 50 for ids in prompts for i in ids)
    assert encode_question(Question(1, 1, "a", "one two"), Words()) == [0, 1, 1]


# ---------------------------------------------------------------- what ships


def test_the_built_in_set_has_32_prompts_of_six_categories():
    questions, problems = read_questions(BUILT_IN)
    assert len(questions) == 32 and not problems
    categories = {"chat", "code", "maths", "summary", "translation", "retrieval"}
    assert {q.category for q in questions} == categories
    assert len({q.text for q in questions}) == len({q.question_id for q in questions}) == 32
    assert {q.category for q in spread(questions, 6)} == categories


def test_spread_takes_from_every_category_in_turn_and_keeps_the_order():
    questions = [Question(i, i, category, "x") for i, category in enumerate("aaabbc")]
    assert [q.question_id for q in spread(questions, 4)] == [0, 1, 3, 5]
    assert spread(questions, 99) == questions


def test_the_tuning_prompts_are_not_those_of_the_benchmark():
    tuning_set, problems = read_questions(TUNING)
    assert len(tuning_set) == 24 and not problems
    measured, _ = read_questions(BUILT_IN)
    assert not {q.text for q in tuning_set} & {q.text for q in measured}
    prompts = tuning_prompts(None, 50, 20)
    assert len(prompts) == 24 and {len(ids) for ids in prompts} == {10}
