"""A conversation: turns that follow each other, as far as the context holds them."""

from talon.text import Engine, TextGeneration


class Conversation:
    """Turns that follow each other: messages where a chat template is used, else one text that goes
    on. Where the context is full, what is oldest falls away, but never the `opening` messages, or
    what the tokenizer begins every text with."""

    def __init__(self, engine: Engine, chat: bool, opening: list[dict], room: int) -> None:
        """room: tokens that an answer may take."""
        self.engine, self.chat, self.opening = engine, chat, opening
        self.turns: list = []  # messages, or ids
        self.kept: list = []  # of them, in the prompt made last
        self.start = [] if chat else engine.tokenizer.encode("")
        context = engine.decoder.max_seq_length
        self.limit = context - min(room, context // 4)

    def prompt(self, line: str) -> list[int]:
        """The ids of all turns with `line` behind them."""
        self.kept = self.turns
        ids = self.with_turns(line)
        while self.kept and len(ids) > self.limit:
            excess = len(ids) - self.limit
            self.kept = self.kept[2:] if self.chat else self.kept[excess:]
            ids = self.with_turns(line)
        return ids

    def with_turns(self, line: str) -> list[int]:
        if self.chat:
            asked = {"role": "user", "content": line.rstrip("\n")}
            return self.engine.encode([*self.opening, *self.kept, asked])
        return self.start + self.kept + self.engine.tokenizer.encode(line, add_bos=False)

    def add(self, line: str, text: TextGeneration) -> bool:
        """The line was answered. True if something fell away for it."""
        lost = len(self.kept) < len(self.turns)
        asked = {"role": "user", "content": line.rstrip("\n")}
        said = [asked, {"role": "assistant", "content": text.text}]
        ids = text.generation.ids[len(self.start) :] + text.tokens
        self.turns = self.kept + said if self.chat else ids
        return lost
