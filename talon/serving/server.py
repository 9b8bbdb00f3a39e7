"""Connections and turns, on one thread: between two rounds of the text under way the event loop
reads requests, writes pieces and notices who has left. Texts are decoded one after another.

asyncio and not http.server: deadlines, bounded heads and clients that leave are a line each, and no
other thread takes the interpreter from the decoder. A connection carries one request."""

import asyncio
import io
import json
import re
import traceback
from contextlib import closing, suppress
from hmac import compare_digest
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, parse_headers
from pathlib import Path
from socket import SO_ERROR, SOL_SOCKET

from talon.cli import one_line
from talon.serving.api import Completion, Refused
from talon.text import Engine

MOST_HEAD, MOST_BODY = 2**16, 2**20  # bytes
PATIENCE, LINGER = 20.0, 2.0  # seconds for a request to arrive or an answer to go, and to part
REQUEST = re.compile(rb"([A-Z]+) (/[!-~]*) HTTP/1\.[01]\r\n")
LOCAL = ("localhost", "127.0.0.1", "")  # no browser leaves Host out
CHATS = {"/v1/chat/completions": True, "/v1/completions": False}
MORE = {401: ["WWW-Authenticate: Bearer"], 405: ["Allow: GET, HEAD, POST"]}
FAULTS = {
    asyncio.TimeoutError: (408, "the request took too long to arrive"),
    asyncio.IncompleteReadError: (400, "the request ends too early"),
    asyncio.LimitOverrunError: (431, f"the head of the request has more than {MOST_HEAD} bytes"),
    asyncio.CancelledError: (503, "the server is stopping"),
    ConnectionError: (499, "the client has left"),  # and reads no more of this
    HTTPException: (431, "the request has too many headers"),
    (ValueError, RecursionError): (400, ""),  # these speak for themselves
    FloatingPointError: (500, ""),
    BaseException: (500, "the server made a mistake: see its log"),
}


class Server:
    """One engine for many clients. `card` holds the API's `model` and `system_fingerprint`. A
    `local` server is asked under this machine's own names only."""

    def __init__(self, engine: Engine, card: dict, api_key: str = "", local: bool = True) -> None:
        self.engine, self.card, self.api_key, self.local = engine, card, api_key, local
        self.turn = asyncio.Lock()
        model = {"id": card["model"], "object": "model", "created": 0, "owned_by": "talon", **card}
        self.pages = {
            "/": Path(__file__).with_name("page.html").read_bytes(),
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            f"/v1/models/{card['model']}": model,
        }

    def check_caller(self, path: str, headers: HTTPMessage) -> None:
        """Refuse pages of other origins, by whatever name they found this machine, and whoever
        lacks the key."""
        host, origin = headers.get("Host", ""), headers.get("Origin", "")
        foreign = origin and origin.partition("://")[2] != host
        if foreign or (self.local and re.sub(r":\d*$", "", host) not in LOCAL):
            raise Refused(f"not for host {host[:60]!r} and origin {origin[:60]!r}", 403)
        given = headers.get("Authorization", "").encode(errors="replace")
        known = compare_digest(given, f"Bearer {self.api_key}".encode())
        if self.api_key and path.startswith("/v1/") and not known:
            raise Refused("the API key is missing or wrong", 401, code="invalid_api_key")

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(self, reader, writer)
        # Who has left needs no answer, and who is being told that the server stops no patience.
        with suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
            await exchange.answer()
            await asyncio.wait_for(writer.drain(), PATIENCE)
            await asyncio.wait_for(exchange.part(), LINGER)
        writer.transport.abort()


class Exchange:
    """One connection: a request, and an answer or a refusal."""

    def __init__(
        self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.method, self.streaming = "", False

    async def answer(self) -> None:
        server = self.server
        try:
            path, body = await asyncio.wait_for(self.read(), PATIENCE)
            if path in CHATS and self.method == "POST":
                await self.complete(json.loads(body), CHATS[path])
            elif path in server.pages and self.method in ("GET", "HEAD"):
                self.send(server.pages[path])
            elif path in CHATS or path in server.pages:
                raise Refused(f"{path} does not take {self.method[:60]}", 405)
            else:
                raise Refused(f"there is no {path[:60]} here", 404)
        except BaseException as error:
            self.refuse(error)

    async def read(self) -> tuple[str, bytes]:
        """Path and body of the request; who may not ask is refused before the body comes."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        if not (asked := REQUEST.match(head)):
            raise Refused("this is not an HTTP/1.1 request")
        self.method, path = asked[1].decode(), asked[2].decode().partition("?")[0]
        headers = parse_headers(io.BytesIO(head[asked.end() :]))
        if headers.defects:
            raise Refused("the headers are damaged")
        self.server.check_caller(path, headers)
        length = ",".join(headers.get_all("Content-Length", ["0"]))
        if "Transfer-Encoding" in headers or not re.fullmatch("[0-9]{1,18}", length):
            raise Refused("the length of the body is not known: send Content-Length", 411)
        if int(length) > MOST_BODY:
            raise Refused(f"the body has {length} bytes: {MOST_BODY} are allowed", 413)
        return path, await self.reader.readexactly(int(length))

    async def complete(self, fields: object, chat: bool) -> None:
        """Wait for the turn, and answer with a text."""
        asked = Completion(fields, chat, self.server.engine, self.server.card)
        async with self.server.turn:
            with closing(asked.events()) as events:
                for event in events:
                    await self.pause()
                    if event:
                        self.send(event, streams=asked.streams)

    async def pause(self) -> None:
        """Let others on. Raises if nobody is left to answer: who has only no more to say takes what
        is written, but the system of who has left answers it with a reset."""
        await asyncio.sleep(0)
        if self.reader.at_eof() and not self.streaming:
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = self.writer.get_extra_info("socket")
        if self.writer.is_closing() or raw.getsockopt(SOL_SOCKET, SO_ERROR):
            raise ConnectionAbortedError

    def send(self, body: dict | bytes, status: int = 200, streams: bool = False) -> None:
        """A page, an object, or the next event of a stream; at first the head of the answer."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        if not self.streaming:
            kind = "text/html; charset=utf-8" if data is body else "application/json"
            kind = "Content-Type: " + ("text/event-stream" if streams else kind)
            lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Connection: close", kind]
            lines += ["Cache-Control: no-store", *MORE.get(status, [])]
            lines += [] if streams else [f"Content-Length: {len(data)}"]
            self.writer.write("\r\n".join([*lines, "\r\n"]).encode())
        self.streaming = streams
        if self.method != "HEAD":
            self.writer.write(b"data: %b\n\n" % data if streams else data)

    def refuse(self, error: BaseException) -> None:
        """Say what is wrong. A mistake of ours is shown here, with its traceback."""
        if not isinstance(error, Refused):
            kind = next(kind for kind in FAULTS if isinstance(error, kind))
            if kind is BaseException:
                traceback.print_exception(error)
            status, message = FAULTS[kind]
            error = Refused(message or one_line(error), status)
        self.send(error.answer, error.status, self.streaming)

    async def part(self) -> None:
        """Drop what still comes: closing on unread bytes would reset the connection, and with it
        the answer."""
        self.writer.write_eof()
        while await self.reader.read(MOST_HEAD):
            pass
