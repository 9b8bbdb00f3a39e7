"""Answer files in FastChat's form, so that the scripts of EAGLE and of Spec-Bench judge these runs.

One JSON object a question, a list entry a turn: `idxs` are rounds, `new_tokens` what came of them,
`wall_time` seconds with the prompt's; Spec-Bench also reads `accept_lengths`, of single rounds.
Leaves out: judging the answers."""

import itertools
import json
from pathlib import Path

from talon.decoder import RoundStats
from talon.measuring.report import Cell
from talon.prompts import Question
from talon.tokenizer import Tokenizer
from talon.writing import atomic_file


def accept_lengths(stats: RoundStats) -> list[int]:
    """Tokens of every round, the bonus counted, in falling order: only how many there are of each
    length is known."""
    reached = [stats.rounds, *stats.accepted_by_depth, 0]
    counts = [a - b for a, b in itertools.pairwise(reached)]
    return [n for n in range(len(counts), 0, -1) for _ in range(counts[n - 1])]


def write_answers(
    out: Path, cells: list[Cell], questions: list[Question], tokenizer: Tokenizer
) -> None:
    """OUT/answers/METHOD-TEMPERATURE.jsonl of every method's first repetition."""
    (out / "answers").mkdir(exist_ok=True)
    files: dict[str, dict[int | str, dict]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.repeat, cell.prompt)):
        if cell.repeat:
            break
        name, question, stats = cell.method, questions[cell.prompt], cell.run.stats
        found = files.setdefault(f"{name}-{cell.temperature:g}", {}).setdefault(
            question.question_id,
            {"question_id": question.question_id, "category": question.category, "model_id": name}
            | {"choices": [{"index": 0}]},
        )
        for key, values in {
            "turns": [tokenizer.decode(cell.run.tokens)],
            "idxs": [stats.rounds],
            "new_tokens": [len(cell.run.tokens)],
            "wall_time": [stats.prefill_s + stats.decode_s],
            "accept_lengths": accept_lengths(stats),
        }.items():
            found["choices"][0].setdefault(key, []).extend(values)
    for name, rows in files.items():
        safe = "".join(c if c.isalnum() or c in "-.=" else "_" for c in name)
        with atomic_file(out / "answers" / f"{safe}.jsonl") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in rows.values()).encode())
