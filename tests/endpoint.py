"""Tiny models behind the endpoint, and plain sockets to talk to it, for its tests."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from tiny import random_head, random_model, table_head, table_model
from world import ROOT, VOCAB, save, save_tokenizer

from talon.decoder import Decoder
from talon.serving.server import MOST_HEAD, Server
from talon.text import Engine
from talon.tokenizer import Tokenizer
from talon.trees import parse_tree

LIMIT = 4096
HELLO = [{"role": "user", "content": "Hello"}]
CARD = {"model": "tiny", "system_fingerprint": "tiny.safetensors, fp32, tree chain:2"}


# --- tiny models and servers ----------------------------------------------------------------------


def save_world(directory: Path) -> None:
    """A random target, a head for it, and a tokenizer with a template."""
    save_tokenizer(directory)
    model = random_model(vocab_size=VOCAB, max_seq_length=LIMIT)
    save(directory / "talon.safetensors", model, "target", eos_ids=[2])
    save(directory / "head.safetensors", random_head(model), "draft")


def drafted(tokenizer: Tokenizer) -> Engine:
    model = random_model(vocab_size=VOCAB, max_seq_length=LIMIT)
    decoder = Decoder(model, LIMIT, random_head(model), parse_tree("chain:2"), compile=False)
    return Engine(decoder, tokenizer, (2,), {})


def plain(tokenizer: Tokenizer) -> Engine:
    model = random_model(vocab_size=VOCAB, max_seq_length=LIMIT)
    return Engine(Decoder(model, LIMIT, compile=False), tokenizer, (2,), {})


def speaker(tokenizer: Tokenizer, text: str, ends: bool = True, limit: int = LIMIT) -> Engine:
    """Says `text`, of distinct characters, after whatever came before; then ends or begins again.
    Its head is always right."""
    ids = [tokenizer.token_id(character) for character in text]
    following = torch.full((VOCAB,), ids[0])
    following[torch.tensor(ids)] = torch.tensor([*ids[1:], 2 if ends else ids[0]])
    logits = torch.zeros(VOCAB, VOCAB)
    logits[torch.arange(VOCAB), following] = 10.0
    model = table_model(logits.log_softmax(-1), max_seq_length=limit)
    decoder = Decoder(model, limit, table_head(model), parse_tree("chain:2"), compile=False)
    return Engine(decoder, tokenizer, (2,), {})


@contextmanager
def serving(engine: Engine, **options) -> Iterator[int]:
    """A server on a thread of its own; its port."""
    listening, ended = socket.create_server(("127.0.0.1", 0)), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    ready = threading.Event()

    async def serve() -> None:
        server = Server(engine, CARD, **options)
        await asyncio.start_server(server.connected, sock=listening, limit=MOST_HEAD)
        loops.append(asyncio.get_running_loop())
        ready.set()
        await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield listening.getsockname()[1]
    finally:
        loops[0].call_soon_threadsafe(ended.set)
        thread.join()


# --- talking to it --------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def head(path: str = "/v1/chat/completions", method: str = "POST", **headers: object) -> bytes:
    named = {"Host": "127.0.0.1", **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


def post(body: bytes | dict, path: str = "/v1/chat/completions", **headers: object) -> bytes:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    return head(path, Content_Length=len(data), **headers) + data


def receive(connection: socket.socket) -> tuple[int, str, bytes]:
    """Status, head and body of what the server says until it closes; status 0: nothing."""
    data = b""
    with suppress(ConnectionError):
        while more := connection.recv(65536):
            data += more
    while data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    first, _, body = data.partition(b"\r\n\r\n")
    return int(first.split()[1]) if first else 0, first.decode(), body


def exchange(port: int, data: bytes, half_close: bool = False) -> tuple[int, str, bytes]:
    with connect(port) as connection:
        with suppress(ConnectionError):  # refused before all was sent
            connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return receive(connection)


def ask(port: int, path: str = "/v1/chat/completions", **fields: object) -> dict:
    status, _, body = exchange(port, post({"temperature": 0, **fields}, path))
    assert status == 200, body
    return json.loads(body)


def text_of(answer: dict) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refused(port: int, data: bytes, status: int) -> dict:
    """The API's error object of a request that is refused with this status."""
    got, first, body = exchange(port, data)
    assert got == status, (data[:200], got, body)
    assert "Content-Type: application/json" in first
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 5 < len(error["message"]) < 500 and "Traceback" not in error["message"]
    return error


@contextmanager
def command(world: Path, *argv: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """`python -m talon.serving` with the random model and its head: the process and its port."""
    files = ["--checkpoint_path", world / "talon.safetensors"]
    words = [*files, "--draft_checkpoint_path", world / "head.safetensors", "--tree", "chain:2"]
    words = [sys.executable, "-m", "talon.serving", *map(str, words), "--no_compile", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    try:
        line = ""
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)):
            line = process.stderr.readline()
            assert line, "the server ended"
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
