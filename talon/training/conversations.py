"""Conversations to train a draft head on, as ids with the spans of their answers, read from a file.

A line is one conversation: {"ids": [...], "spans": [[start, end], ...]}, as self_talk.py writes
them, or text as {"messages": [...]} or {"conversations": [...]} (ShareGPT), which the target's chat
template turns into ids. Lines that cannot be used are counted by reason. Leaves out: making
conversations (self_talk.py), tools, several answers a turn.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from model import ModelConfig
from talon.cli import note
from talon.prompts import read_lines
from talon.tokenizer import Tokenizer, is_text

ROLES = {
    "system": "system", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Token ids of a whole conversation and the spans [start, end) of its answers."""

    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


def read_conversations(
    path: Path, tokenizer: Tokenizer | None, config: ModelConfig, limit: int
) -> list[Conversation]:
    """What a file holds to train on; lines without are counted on standard error by reason."""
    found, skipped = [], Counter()
    lines = read_lines(path)
    for line in lines:
        row = read_conversation(line, tokenizer, config.eos_ids)
        if isinstance(row, Conversation):
            row = fault_of(row, config.vocab_size, limit) or row
        if isinstance(row, str):
            skipped[row] += 1
        else:
            found.append(row)
    for reason, count in skipped.items():
        note(f"skipped {count} of {len(lines)} conversations: {reason}")
    if not found:
        raise ValueError(
            f"{path} holds no conversation to train on: each needs an answer and at most {limit} "
            "tokens"
        )
    return found


def read_conversation(
    line: dict, tokenizer: Tokenizer | None, stop_ids: tuple[int, ...]
) -> Conversation | str:
    """One line of a data file, ours or another's, or why it cannot be used."""
    if "ids" in line:
        ids, spans = line["ids"], line.get("spans")
        if not is_whole_numbers(ids):
            return "ids that are no list of whole numbers"
        if not (
            isinstance(spans, list) and all(is_whole_numbers(s) and len(s) == 2 for s in spans)
        ):
            return "spans that are no list of [start, end]"
        return Conversation(ids, [(start, end) for start, end in spans])
    messages = read_messages(line)
    if isinstance(messages, str):
        return messages
    if tokenizer is None:
        raise ValueError(
            "the data is text, but no tokenizer lies next to the checkpoint: copy tokenizer.json "
            "there"
        )
    return tokenise(messages, tokenizer, stop_ids)


def is_whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def read_messages(line: dict) -> list[dict] | str:
    """The messages of a line in one form, or why it cannot be used."""
    turns = line.get("messages", line.get("conversations"))
    if not isinstance(turns, list):
        return "neither messages nor conversations"
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
            return "unknown role"
        if not is_text(content):
            return "half of a surrogate pair"
        messages.append({"role": ROLES[role], "content": content})
    # ShareGPT has some that begin in the middle.
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    return messages


def tokenise(
    messages: list[dict], tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> Conversation | str:
    """Ids and answer spans of a conversation, or why it cannot be used.

    The chat template itself says where answers are: what it renders up to an answer is the prompt
    that decoding would start from, and the answer is what it appends, with the token that ends a
    turn.
    """
    stops = [tokenizer.decode([i], skip_special=False) for i in stop_ids]
    ids: list[int] = []
    spans, done = [], ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render_chat(messages[:index])
        full = tokenizer.render_chat(messages[: index + 1])
        content = message["content"].strip()
        if not (prompt.startswith(done) and full.startswith(prompt) and content):
            return "the template rewrites earlier turns, or an answer is empty"
        at = full.find(content, len(prompt))
        if at < 0:
            return "the template changes answers"
        end = at + len(content)
        end += next((len(stop) for stop in stops if full.startswith(stop, end)), 0)
        ids += tokenizer.encode(prompt[len(done) :], add_bos=False)
        answer = tokenizer.encode(full[len(prompt) : end], add_bos=False)
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
        done = full[:end]
    return Conversation(ids, spans) if spans else "no answer"


def fault_of(row: Conversation, vocab_size: int, limit: int) -> str | None:
    """Why a conversation cannot be trained on, if so. The first id that can be guessed is the
    third."""
    if len(row.ids) > limit:
        return f"longer than {limit} tokens"
    if not row.ids or not 0 <= min(row.ids) <= max(row.ids) < vocab_size:
        return "ids outside the vocabulary"
    if not all(0 <= start <= end <= len(row.ids) for start, end in row.spans):
        return "spans outside the conversation"
    if not any(end > max(start, 2) for start, end in row.spans):
        return "no answer"
    return None
