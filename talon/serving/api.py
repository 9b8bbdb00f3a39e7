"""The OpenAI API as this server speaks it: what may be asked, and the objects that answer.

Leaves out: connections and turns (server.py)."""

import json
import random
from collections.abc import Iterator
from time import time
from uuid import uuid4

from talon.cli import note
from talon.records import sample_record
from talon.text import Engine

# What has an effect, each with an example of its kind; where a list is, a text will do as well, and
# a whole number for a fraction. Everything else is refused by name unless it asks for nothing.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
ENDS = {"max_tokens": 0, "stop": [""], "ignore_eos": False}
STREAM = {"stream": False, "stream_options": {"include_usage": False}}
COMPLETION = {"model": "", "prompt": [0], **ENDS, **SAMPLING, **STREAM}
MESSAGE = {"role": "", "content": [{"type": "", "text": ""}]}
CHAT = {"messages": [MESSAGE], "max_completion_tokens": 0, "chat_template_kwargs": {}}
CHAT |= {name: kind for name, kind in COMPLETION.items() if name != "prompt"}
IDLE = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
NEUTRAL = {"n": 1, "best_of": 1, "tool_choice": "auto", "response_format": {"type": "text"}}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Refused(Exception):
    """A request that gets the API's error object instead of an answer."""

    def __init__(self, message: str, status: int = 400, param: str = "", code: str = "") -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.status, self.answer = status, {"error": error}


def check(value: object, like: object, param: str = "") -> object:
    """What has an effect of a value, if it is like the example. Null counts as not given."""
    kinds = {float: (float, int), list: (str, list)}.get(type(like), (type(like),))
    if type(value) not in kinds:
        given = f"{param or 'the body'} {json.dumps(value)[:60]}"
        raise Refused(f"{given}: give {' or '.join(kind.__name__ for kind in kinds)}", param=param)
    if isinstance(value, list):
        return [check(item, like[0], f"{param}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict) or not like:
        return value
    found = {}
    for name, item in value.items():
        where = f"{param}.{name[:60]}".lstrip(".")
        if item is not None and name in like:
            found[name] = check(item, like[name], where)
        elif not (item is None or name in IDLE or item == NEUTRAL.get(name, type(item)())):
            message = f"{where} {json.dumps(item)[:60]} is not supported: leave it out"
            raise Refused(message, param=where, code="unsupported_parameter")
    return found


def encode_chat(engine: Engine, messages: list[dict], options: dict) -> list[int]:
    """The ids of a conversation, whose contents may be lists of text parts."""
    if not messages or isinstance(messages, str) or "messages" in options:
        raise Refused("give a list of messages, in messages alone", param="messages")
    if not engine.tokenizer.has_chat_template:
        raise Refused("this checkpoint has no chat template: use /v1/completions")
    for name in options:
        if not engine.tokenizer.takes_option(name):
            where = f"chat_template_kwargs.{name[:60]}"
            message = f"{where}: the chat template has no such variable: leave it out"
            raise Refused(message, param=where, code="unsupported_parameter")
    turns = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or content is None:
            wanted = f"messages[{i}] needs content and a role of {', '.join(ROLES)}"
            raise Refused(wanted, param=f"messages[{i}]")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        turns.append({"role": ROLES[role], "content": content})
    return engine.tokenizer.encode_chat(turns, options)


class Completion:
    """A text that is asked for, not yet run. The API's defaults hold: temperature 1, a new seed
    each time, at most 16 tokens for /v1/completions, and for a chat what the context holds. `card`
    names the model and says how it is run."""

    def __init__(self, body: object, chat: bool, engine: Engine, card: dict) -> None:
        fields = check(body, CHAT if chat else COMPLETION)
        if (model := fields.pop("model", card["model"])) != card["model"]:
            message = f"model {model[:60]!r} is not served here: ask for {card['model']!r}"
            raise Refused(message, 404, "model", "model_not_found")
        self.chat, self.streams = chat, fields.pop("stream", False)
        self.with_usage = fields.pop("stream_options", {}).get("include_usage", False)
        limit = fields.pop("max_tokens", 2**31 if chat else 16)
        limit = fields.pop("max_completion_tokens", limit)
        messages, options = fields.pop("messages", []), fields.pop("chat_template_kwargs", {})
        prompt = fields.pop("prompt", None)
        ids = encode_chat(engine, messages, options) if chat else engine.encode(prompt)
        chosen = {"temperature": 1.0, "seed": random.getrandbits(62), **fields}
        self.text = engine.generate(ids, max_new_tokens=limit, **chosen)
        kind = "chat.completion" if chat else "text_completion"
        kind += ".chunk" if chat and self.streams else ""
        id = f"{'chat' * chat}cmpl-{uuid4().hex}"
        self.head = {"id": id, "object": kind, "created": int(time()), **card}
        self.role = {"role": "assistant"}  # said once

    def events(self) -> Iterator[dict | bytes | None]:
        """Run it: what is to be sent, and None wherever others may go on. A long prompt is read in
        parts. To close this early ends the text with its round, which is kept."""
        run, decoder = self.text.generation, self.text.engine.decoder
        reused, most = decoder.reusable(run.ids), 4 * decoder.chunks[-1]
        yield None
        while (start := decoder.reusable(run.ids)) + most < len(run.ids):
            decoder.prefill(run.ids[: start + most], start, decoder.picks.set(run.sampling))
            yield None
        try:
            for piece, drafted in self.text.marked:
                yield self.part(piece, drafted=drafted) if self.streams and piece else None
        finally:
            run.end(run.stop_reason or "gone")
            list(self.text.marked)
        note(f"{len(run.ids)} tokens, {reused} of them reused, then {len(run.tokens)} new ones")
        last, usage = {"finish_reason": FINISH[run.stop_reason]}, {"usage": self.usage(reused)}
        if not self.streams:
            yield self.part(self.text.text, **last) | usage
            return
        yield self.part("", **last)
        if self.with_usage:
            yield {**self.head, "choices": [], **usage}
        yield b"[DONE]"

    def part(self, piece: str, **more: object) -> dict:
        """A piece of a stream, or a whole answer."""
        choice = {"index": 0, "finish_reason": None, "logprobs": None, **more}
        key = "delta" if self.streams else "message"
        choice |= {key: {**self.role, "content": piece}} if self.chat else {"text": piece}
        self.role = {}
        return {**self.head, "choices": [choice]}

    def usage(self, reused: int) -> dict:
        record = sample_record(self.text.generation, None)
        prompt, new = record["prompt_tokens"], len(record["tokens"])
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        measured = {name: record[name] for name in ("rounds", "acceptance_length", "tokens_per_s")}
        return {**counts, "prompt_tokens_details": {"cached_tokens": reused}, **measured}
