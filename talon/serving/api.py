"""The OpenAI API as this server speaks it: what may be asked, and the objects that answer.

What has an effect here is read; whatever else asks for something is refused by name. Leaves out:
connections and turns (server.py)."""

import json
import random
import time
import uuid

from talon.records import sample_record
from talon.text import Engine

TEXT, NUMBER, COUNT, FLAG, LIST, OBJECT = (str,), (int, float), (int,), (bool,), (list,), (dict,)
SAMPLING = {"temperature": NUMBER, "top_p": NUMBER, "top_k": COUNT, "seed": COUNT}
BOTH = {
    "model": TEXT, "stream": FLAG, "stream_options": OBJECT, "max_tokens": COUNT,
    "stop": TEXT + LIST, "ignore_eos": FLAG, **SAMPLING,
}  # fmt: skip
COMPLETION = {"prompt": TEXT + LIST, **BOTH}
CHAT = {"messages": LIST, "max_completion_tokens": COUNT, "chat_template_kwargs": OBJECT, **BOTH}
MESSAGE, PART = {"role": TEXT, "content": TEXT + LIST}, {"type": TEXT, "text": TEXT}
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


def check(fields: object, known: dict[str, tuple[type, ...]], where: str = "") -> dict:
    """The fields that have an effect, each of its type. Null counts as not given."""
    if not isinstance(fields, dict):
        raise Refused(f"{where or 'the body'} must be a JSON object", param=where)
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        param = f"{where}.{name[:60]}".lstrip(".")
        if name in known and type(value) not in known[name]:
            kinds = " or ".join(kind.__name__ for kind in known[name])
            raise Refused(f"{param} {json.dumps(value)[:60]}: give {kinds}", param=param)
        idle = value == NEUTRAL[name] if name in NEUTRAL else name in IDLE or not value
        if name not in known and not idle:
            message = f"{param} {json.dumps(value)[:60]} is not supported: leave it out"
            raise Refused(message, param=param, code="unsupported_parameter")
    return {name: value for name, value in given.items() if name in known}


def read_message(message: object, where: str) -> dict:
    """Role and text of a message, whose content may be a list of text parts."""
    message = check(message, MESSAGE, where)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES or content is None:
        raise Refused(f"{where} needs content and a role of {', '.join(ROLES)}", param=where)
    if isinstance(content, list):
        parts = [check(part, PART, f"{where}.content[{i}]") for i, part in enumerate(content)]
        content = "".join(part.get("text", "") for part in parts)
    return {"role": ROLES[role], "content": content}


def encode(engine: Engine, fields: dict, chat: bool) -> list[int]:
    """The ids of a conversation, or of a prompt, which may be ids itself."""
    if not chat:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and any(type(token) is not int for token in prompt):
            raise Refused("prompt must be one text, or one list of token ids", param="prompt")
        return engine.encode(prompt)
    messages, options = fields.get("messages"), fields.get("chat_template_kwargs", {})
    if not messages or "messages" in options:
        raise Refused("give at least one message, in messages alone", param="messages")
    if not engine.tokenizer.has_chat_template:
        raise Refused("this checkpoint has no chat template: use /v1/completions")
    turns = [read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return engine.tokenizer.encode_chat(turns, options)


class Completion:
    """A text that is asked for, not yet run, and the objects that answer. The API's defaults hold:
    temperature 1, a new seed each time, at most 16 tokens for /v1/completions, and for a chat what
    the context holds. `card` names the model and says how it is run."""

    def __init__(self, body: object, chat: bool, engine: Engine, card: dict) -> None:
        fields = check(body, CHAT if chat else COMPLETION)
        more = check(fields.get("stream_options", {}), {"include_usage": FLAG}, "stream_options")
        if (model := fields.get("model", card["model"])) != card["model"]:
            message = f"model {model[:60]!r} is not served here: ask for {card['model']!r}"
            raise Refused(message, 404, "model", "model_not_found")
        stop = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop", [])
        if not all(isinstance(text, str) for text in stop):
            raise Refused("stop must be a text or a list of texts", param="stop")
        chosen = {"temperature": 1.0, "seed": random.getrandbits(62), **fields}
        limit = fields.get("max_tokens", 2**31 if chat else 16)
        self.text = engine.generate(
            encode(engine, fields, chat),
            max_new_tokens=fields.get("max_completion_tokens", limit),
            stop=tuple(stop),
            ignore_eos=fields.get("ignore_eos", False),
            **{name: chosen[name] for name in SAMPLING if name in chosen},
        )
        self.chat, self.streams = chat, fields.get("stream", False)
        self.with_usage = more.get("include_usage", False)
        name = "chat.completion" if chat else "text_completion"
        name += ".chunk" if chat and self.streams else ""
        number = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": number, "object": name, "created": int(time.time()), **card}
        self.role = {"role": "assistant"}  # said once

    def part(self, piece: str, **more: object) -> dict:
        """A piece of a stream, or a whole answer."""
        choice = {"index": 0, "finish_reason": None, "logprobs": None, **more}
        key = "delta" if self.streams else "message"
        choice |= {key: {**self.role, "content": piece}} if self.chat else {"text": piece}
        self.role = {}
        return {**self.head, "choices": [choice]}

    def last(self, piece: str) -> dict:
        """The end of a stream, or a whole answer."""
        return self.part(piece, finish_reason=FINISH[self.text.generation.stop_reason])

    def usage(self, reused: int) -> dict:
        record = sample_record(self.text.generation, None)
        prompt, new = record["prompt_tokens"], len(record["tokens"])
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        measured = {name: record[name] for name in ("rounds", "acceptance_length", "tokens_per_s")}
        return {**counts, "prompt_tokens_details": {"cached_tokens": reused}, **measured}
