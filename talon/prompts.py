"""Prompts for measuring: the sets that ship with the project, or any FastChat-style question.jsonl.

One JSON object a line: `turns`, a list of user messages of which the first is used, or `prompt`,
one message; `category` and `question_id` where the set has them. What `--tree auto` is tuned on is
never what the benchmark measures by itself. Leaves out: what is measured with them (benchmark.py,
talon/tuning/, talon/training/evaluation.py).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model import ModelConfig
from talon.tokenizer import Tokenizer, is_text

DATA = Path(__file__).with_name("data")  # what ships: prompts, and texts to quantise by
BUILT_IN = DATA / "benchmark_prompts.jsonl"  # 32
TUNING = DATA / "tuning_prompts.jsonl"  # 24, half of them chat, in mixed order


def json_lines(path: Path) -> Iterator[tuple[int, dict | str]]:
    """The number of every line that is not blank, with its object or what is wrong with it."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                value = json.loads(line)
                yield number, value if isinstance(value, dict) else "not a JSON object"
            except (ValueError, RecursionError) as error:
                yield number, f"not JSON in UTF-8 ({error})"


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON lines file; ValueError names the line that is none."""
    rows = []
    for number, value in json_lines(path):
        if isinstance(value, str):
            raise ValueError(f"{path}, line {number}: {value}: give one JSON object a line")
        rows.append(value)
    return rows


@dataclass(frozen=True)
class Question:
    line: int
    question_id: int | str
    category: str
    text: str


def read_questions(path: Path) -> tuple[list[Question], list[str]]:
    """The questions of a file, and one sentence for every line that is not one."""
    questions, problems = [], []
    for number, value in json_lines(path):
        parsed = value if isinstance(value, str) else parse_question(number, value)
        if isinstance(parsed, Question):
            questions.append(parsed)
        else:
            problems.append(f"{path}, line {number}: {parsed}")
    if not questions and not problems:
        raise ValueError(
            f"question file {path} is empty: give one JSON object a line, with `turns`"
        )
    return questions, problems


def parse_question(number: int, value: dict) -> Question | str:
    """The question of one line, or what is wrong with it."""
    turns = value.get("turns", [value["prompt"]] if "prompt" in value else None)
    name, category = value.get("question_id", number), value.get("category", "")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return "it needs turns, a list of at least one text, or prompt, a text"
    if not turns[0].strip():
        return "the first turn is empty"
    if not is_text(turns[0]):
        return "the first turn holds half of a surrogate pair"
    if not isinstance(name, int | str) or not isinstance(category, str):
        return "question_id must be a number or a text, and category a text"
    return Question(number, name, category, turns[0])


def encode_question(question: Question, tokenizer: Tokenizer) -> list[int]:
    """Token ids, as a chat's first message where the model has a template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": question.text}])
    return tokenizer.encode(question.text)


def spread(questions: list[Question], count: int) -> list[Question]:
    """`count` questions, or all there are, in file order, taken from the categories in turn."""
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


def tuning_prompts(tokenizer: Tokenizer | None, config: ModelConfig) -> list[list[int]]:
    """What `--tree auto` is tuned on, as ids that leave half of the context or more."""
    questions, _ = read_questions(TUNING)
    longest = min(512, config.max_seq_length // 2)
    if tokenizer is None:
        return made_up_prompts(config.vocab_size, len(questions), longest)
    return [encode_question(question, tokenizer)[:longest] for question in questions]
