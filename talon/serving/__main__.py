"""A local endpoint that speaks the OpenAI API, with one page to talk to the model.

    python -m talon.serving --checkpoint_path F --draft_checkpoint_path H

The address it prints is the page's; clients add /v1 to it. Texts are decoded one at a time, a
second request waits its turn. Ctrl-C or SIGTERM ends it."""

if __name__ == "__main__":  # what follows is imported, which takes seconds, and its main is run
    from talon.cli import start

    start("talon.serving.__main__")

import asyncio
import signal
import socket
from argparse import Namespace

from talon.cli import Parser, add_files, add_running_options, note
from talon.sampling import SamplingConfig
from talon.serving.server import LOCAL, MOST_HEAD, Server
from talon.text import Engine, load


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(prog="python -m talon.serving", description="Serve a converted checkpoint.")
    add = parser.add_argument
    add_files(add)
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets the network in")
    add("--port", type=int, default=8000, help="0: a free one")
    add("--api_key", default="", help="what clients must send; without it everyone may ask")
    add_running_options(parser)
    return parser.parse_args(argv)


def load_engine(args: Namespace) -> Engine:
    """The model, with whatever a request may need compiled."""
    names = ("tree", "device", "dtype", "max_seq_length", "keep_head")
    options = {name: getattr(args, name) for name in names}
    options |= {"compile": args.compile, "tune": "measure"}
    engine = load(args.checkpoint_path, args.draft_checkpoint_path, **options)
    if engine.tokenizer is None:
        raise ValueError(f"no tokenizer next to {args.checkpoint_path}: copy tokenizer.json there")
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 40)) if args.compile else ():
        engine.warm_up(SamplingConfig(temperature, top_k))
    return engine


async def serve(args: Namespace, listening: socket.socket) -> None:
    """Until a signal comes; then the text under way ends with its round."""
    engine, path = load_engine(args), args.checkpoint_path
    mode = engine.card["quantization"] or engine.card["dtype"]
    how = f"{path.name}, {mode}, tree {engine.card['tree']}"
    card = {"model": path.resolve().parent.name, "system_fingerprint": how}
    server = Server(engine, card, args.api_key, local=args.host in LOCAL)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await asyncio.start_server(server.connected, sock=listening, limit=MOST_HEAD)
    note("serving {} at http://{}:{}".format(how, *listening.getsockname()))
    await ended.wait()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        listening = socket.create_server((args.host, args.port))
    except (OSError, OverflowError) as error:
        given = f"--host {args.host} --port {args.port}"
        raise ValueError(f"{given} cannot be listened at ({error}): give another") from None
    asyncio.run(serve(args, listening))
    return 0
