"""Conversations to train a draft head on, as ids with the spans of their answers, read from a file.

A line is one conversation: {"ids": [...], "spans": [[start, end], ...]}, as self_talk.py writes
them, or text as {"messages": [...]} or {"conversations": [...]} (ShareGPT), which the target's chat
template turns into ids. Leaves out: making them (self_talk.py), tools, several answers a turn.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from model import ModelConfig
from talon.cli import note
from talon.prompts import read_lines
from talon.tokenizer import Tokenizer, is_text

ROLES = {
    "system": "system", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip
THOUGHT = "</think>"  # the end of an answer's reasoning


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
    for line in read_lines(path):
        rows = read_conversation(line, tokenizer, config.eos_ids)
        for row in [rows] if isinstance(rows, str) else rows:
            fault = row if isinstance(row, str) else fault_of(row, config.vocab_size, limit)
            if fault:
                skipped[fault] += 1
            else:
                found.append(row)
    for reason, count in skipped.items():
        note(f"skipped {count} of {len(found) + skipped.total()} conversations: {reason}")
    if not found:
        raise ValueError(f"{path} has no conversation with an answer in {limit} tokens: give some")
    return found


def read_conversation(
    line: dict, tokenizer: Tokenizer | None, stop_ids: tuple[int, ...]
) -> list[Conversation] | str:
    """What one line of a data file gives, ours or another's, or why it cannot be used."""
    if "ids" in line:
        ids, spans = line["ids"], line.get("spans")
        if not is_whole_numbers(ids):
            return "ids that are no list of whole numbers"
        if not (
            isinstance(spans, list) and all(is_whole_numbers(s) and len(s) == 2 for s in spans)
        ):
            return "spans that are no list of [start, end]"
        return [Conversation(ids, [(start, end) for start, end in spans])]
    messages = read_messages(line)
    if isinstance(messages, str):
        return messages
    return tokenise(messages, need_template(tokenizer), stop_ids)


def need_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, if it can turn a conversation into ids; ValueError if not."""
    if tokenizer is None or "default" not in tokenizer.settings.templates:
        lacks = "no tokenizer" if tokenizer is None else "a tokenizer without a default template"
        raise ValueError(
            f"the target has {lacks}, which text needs: copy tokenizer.json and "
            "tokenizer_config.json next to it, or give --data FILE with ids and spans"
        )
    return tokenizer


def is_whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def read_messages(line: dict) -> list[dict] | str:
    """The messages of a line in one form, or why it cannot be used."""
    turns = line.get("messages") or line.get("conversations")
    if not isinstance(turns, list):
        return "neither messages nor conversations"
    messages = []
    for turn in turns:
        turn = turn if isinstance(turn, dict) else {}
        role, content = turn.get("role") or turn.get("from"), turn.get("content")
        text = text_of(turn.get("value") if content is None else content)
        if not isinstance(role, str) or role not in ROLES:
            return "unknown role"
        if text is None:
            return "a turn that is not text"
        if not is_text(text):
            return "half of a surrogate pair"
        messages.append({"role": ROLES[role], "content": text})
    # ShareGPT has some that begin in the middle.
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    return messages


def text_of(content: object) -> str | None:
    """A turn's content: a text or a list of such parts; None if anything else is in it."""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else p for p in content]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def tokenise(
    messages: list[dict], tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> list[Conversation] | str:
    """The ids that decoding would see and the spans of the answers in them, or why not.

    The chat template itself says where answers are: what it renders up to an answer is the prompt
    that decoding would start from, and the answer is what it appends, with the token that ends a
    turn. Where it writes earlier turns in another way, without their reasoning say, the answers
    after them stand in a conversation of their own."""
    stops = [re.escape(tokenizer.decode([i], skip_special=False)) for i in stop_ids]
    end_of_turn = re.compile(rf"\s*({'|'.join(filter(None, stops)) or '(?!)'})")
    rows: list[tuple[str, list[tuple[int, int]]]] = []  # texts, and where their answers are
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            prompt = tokenizer.render_chat(messages[:index])
            full = tokenizer.render_chat(messages[: index + 1])
        except ValueError:
            return "the template refuses it"
        rewritten = prompt[shared(prompt, full) :]
        if rewritten and messages[index - 1]["content"] in rewritten:
            return "the template rewrites earlier turns"
        found = find_answer(prompt, full, message["content"].strip(), end_of_turn)
        if found is None:
            return "the template changes an answer, or it is empty"
        start, text = found
        earlier = rows.pop()[1] if rows and text.startswith(rows[-1][0]) else []
        rows.append((text, [*earlier, (start, len(text))]))
    return [locate(text, places, tokenizer) for text, places in rows] or "no answer"


def find_answer(
    prompt: str, full: str, content: str, end_of_turn: re.Pattern
) -> tuple[int, str] | None:
    """Where an answer starts, and the text up to its end. prompt: what the template renders before
    it; full: the same with the answer."""
    start = shared(prompt, full)
    said, at = content, full.find(content, start)
    dropped = at < 0 and THOUGHT in content and THOUGHT not in full[start:]
    if at < 0:  # the template leaves the reasoning out, or has begun it in the prompt
        said = content.rpartition(THOUGHT)[2].strip()
        at = full.find(said, max(start, full.find(THOUGHT, start)))
    if at < 0 or not said:
        return None
    ending = end_of_turn.match(full, at + len(said))
    end = ending.end() if ending else at + len(said)
    if not dropped:
        return start, full[:end]
    if prompt.rstrip().endswith("<think>"):
        content = content.removeprefix("<think>").lstrip()
    return len(prompt), prompt + content + full[at + len(said) : end]


def locate(text: str, places: list[tuple[int, int]], tokenizer: Tokenizer) -> Conversation:
    """The ids of a whole text, and the answers at some places of it as spans of ids."""
    ids = tokenizer.encode(text, add_bos=False)
    cuts = {cut: shared(ids, tokenizer.encode(text[:cut], False)) for cut in chain(*places)}
    return Conversation(ids, [(cuts[start], cuts[end]) for start, end in places])


def shared(a: str | list[int], b: str | list[int]) -> int:
    """How many characters or ids two of them begin with alike."""
    return len(os.path.commonprefix([a, b]))


def fault_of(row: Conversation, vocab_size: int, limit: int) -> str | None:
    """Why a conversation cannot be trained on, if so. The third id is the first to be guessed."""
    if len(row.ids) > limit:
        return f"longer than {limit} tokens"
    if not row.ids or not 0 <= min(row.ids) <= max(row.ids) < vocab_size:
        return "ids outside the vocabulary"
    if not all(0 <= start <= end <= len(row.ids) for start, end in row.spans):
        return "spans outside the conversation"
    if not any(end > max(start, 2) for start, end in row.spans):
        return "no answer"
    return None
