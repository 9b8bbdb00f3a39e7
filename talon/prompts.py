"""Prompts for measuring: the sets that ship with the project, or any FastChat-style question.jsonl.

One JSON object a line: `question_id`, `category` and `turns`, a list of user messages of which the
first is used. What `--tree auto` is tuned on is never what the benchmark measures by itself. Leaves
out: what is measured with them (benchmark.py, tuning.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from model import ModelConfig
from talon.tokenizer import Tokenizer, is_text


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON lines file; ValueError names the line that is none."""
    rows: list[dict] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
            reason = None if isinstance(row, dict) else "it is no object"
        except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
            reason = str(error)
        if reason:
            raise ValueError(
                f"{path} line {number} is not a JSON object in UTF-8 ({reason}): "
                "one conversation a line is expected"
            )
        rows += [row] if row else []
    return rows


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of the first turns: {"turns": [...]} as MT-bench has them, or {"prompt": "..."}."""
    prompts = []
    for row in read_lines(path):
        turns = row.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
        if not isinstance(text, str):
            raise ValueError(
                f'{path}: question {len(prompts) + 1} has neither "turns", a list of texts, nor '
                '"prompt", a text'
            )
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": text}]))
    if not prompts:
        raise ValueError(f"{path} holds no question")
    return prompts


DATA = Path(__file__).with_name("data")  # what ships: prompts, and texts to quantise by
BUILT_IN = DATA / "benchmark_prompts.jsonl"  # 32
TUNING = DATA / "tuning_prompts.jsonl"  # 24, half of them chat, in mixed order


@dataclass(frozen=True)
class Question:
    line: int
    question_id: int | str
    category: str
    text: str


def read_questions(path: Path) -> tuple[list[Question], list[str]]:
    """The questions of a file, and one sentence for every line that is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"question file {path} is not UTF-8 text: save it as UTF-8") from None
    questions, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            parsed = parse_question(number, line)
            if isinstance(parsed, Question):
                questions.append(parsed)
            else:
                problems.append(f"{path}, line {number}: {parsed}")
    if not questions and not problems:
        raise ValueError(
            f"question file {path} is empty: give one JSON object a line, with `turns`"
        )
    return questions, problems


def parse_question(number: int, line: str) -> Question | str:
    """The question of one line, or what is wrong with it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    if not isinstance(value, dict):
        return "not a JSON object"
    missing = [name for name in ("question_id", "category", "turns") if name not in value]
    if missing:
        return f"field {', '.join(missing)} is missing"
    turns = value["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return "turns must be a list of at least one text"
    if not turns[0].strip():
        return "the first turn is empty"
    if not is_text(turns[0]):
        return "the first turn holds half of a surrogate pair"
    if not isinstance(value["question_id"], int | str) or not isinstance(value["category"], str):
        return "question_id must be a number or a text, and category a text"
    return Question(number, value["question_id"], value["category"], turns[0])


def encode_question(question: Question, tokenizer: Tokenizer) -> list[int]:
    """Token ids, as a chat's first message where the model has a template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": question.text}])
    return tokenizer.encode(question.text)


def spread(questions: list[Question], count: int) -> list[Question]:
    """`count` questions in file order, taken from the categories in turn; all of them where there
    are fewer.
    """
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
