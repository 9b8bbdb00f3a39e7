"""Prompts for measuring: the sets that ship with the project, or any FastChat-style question.jsonl.

One JSON object a line: `turns`, a list of user messages, or `prompt`, one message; `question_id`
and `category` where the set has them. What `--tree auto` is tuned on is never what the benchmark
measures by itself. Leaves out: what is measured with them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from talon.tokenizer import Tokenizer, is_text

DATA = Path(__file__).with_name("data")  # what ships: prompts, and texts to quantise by
BUILT_IN = DATA / "benchmark_prompts.jsonl"  # 32
TUNING = DATA / "tuning_prompts.jsonl"  # 24, half of them chat, in mixed order


@dataclass(frozen=True)
class Question:
    line: int
    question_id: int | str
    category: str
    text: str
    later: tuple[str, ...] = ()  # further turns
    turn: int = 1


def json_lines(path: Path) -> Iterator[tuple[int, dict, str]]:
    """Number and object of every line of a JSON lines file that is not empty. Where a line is no
    object, the third part says why. A byte order mark is no part of the text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = list(file)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value, problem = json.loads(line), "not a JSON object"
        except (ValueError, RecursionError) as error:
            value, problem = None, f"not JSON ({error})"
        yield (number, value, "") if isinstance(value, dict) else (number, {}, problem)


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON lines file; ValueError names the first line that is none."""
    rows = []
    for number, row, problem in json_lines(path):
        if problem:
            raise ValueError(f"{path}, line {number}: {problem}: give one JSON object a line")
        rows.append(row)
    return rows


def read_questions(path: Path) -> tuple[list[Question], list[str]]:
    """The questions of a file, and one sentence for every line that is not one."""
    questions, problems = [], []
    for number, row, problem in json_lines(path):
        problem = problem or wrong_with(row)
        if problem:
            problems.append(f"{path}, line {number}: {problem}")
        else:
            name, category = row.get("question_id", number), row.get("category", "")
            text, *later = row["turns"] if "turns" in row else [row["prompt"]]
            questions.append(Question(number, name, category, text, tuple(later)))
    if not questions and not problems:
        raise ValueError(f"{path} is empty: give one JSON object a line, with `turns`")
    return questions, problems


def wrong_with(row: dict) -> str:
    """Why an object is no question; empty if it is one."""
    turns = row.get("turns", [row.get("prompt")])
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return "it needs turns, a list of at least one text, or prompt, a text"
    if not turns[0].strip():
        return "the first turn is empty"
    if not is_text(turns[0]):
        return "the first turn holds half of a surrogate pair"
    named = isinstance(row.get("question_id", 0), int | str)
    if not named or not isinstance(row.get("category", ""), str):
        return "question_id must be a number or a text, and category a text"
    return ""


def encode_question(question: Question, tokenizer: Tokenizer, answer: str = "") -> list[int]:
    """Token ids, as a chat's first message where the model has a template; with the answer to it,
    up to the second turn."""
    texts = [question.text, answer, question.later[0]] if answer else [question.text]
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n\n".join(texts))
    roles = "user", "assistant", "user"
    messages = zip(roles, texts, strict=False)
    return tokenizer.encode_chat([{"role": role, "content": text} for role, text in messages])


def spread(questions: list[Question], count: int) -> list[Question]:
    """`count` questions in file order, or all, taken from the categories in turn."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    turns = range(max(map(len, groups.values()), default=0))
    dealt = [group[turn] for turn in turns for group in groups.values() if turn < len(group)]
    return sorted(dealt[:count], key=lambda question: question.line)


def made_up_prompts(vocab_size: int, count: int, longest: int) -> list[list[int]]:
    """Ids that repeat themselves, where no tokenizer makes ids of text."""
    return [
        [(7 * n + 3 * (i % (5 + n)) + 1) % vocab_size for i in range(min(24, longest))]
        for n in range(count)
    ]


def tuning_prompts(
    tokenizer: Tokenizer | None, vocab_size: int, max_seq_length: int
) -> list[list[int]]:
    """What `--tree auto` is tuned on, as ids that leave half of the context or more."""
    questions, _ = read_questions(TUNING)
    longest = min(512, max_seq_length // 2)
    if tokenizer is None:
        return made_up_prompts(vocab_size, len(questions), longest)
    return [encode_question(question, tokenizer)[:longest] for question in questions]
