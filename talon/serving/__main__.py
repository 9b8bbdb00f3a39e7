"""A local endpoint that speaks the OpenAI API, with one page to talk to the model.

    python -m talon.serving --checkpoint_path F --draft_checkpoint_path H

The address it prints is the page's; clients add /v1 to it. Texts are decoded one at a time, a
second request waits its turn. Ctrl-C or SIGTERM ends it."""

if __name__ == "__main__":  # before the imports that take seconds
    from talon.cli import guard_imports

    guard_imports()

import asyncio
import signal
import socket
from argparse import Namespace
from pathlib import Path

from talon.cli import DEMO, Parser, note, run
from talon.sampling import SamplingConfig
from talon.serving.server import LOCAL, MOST_HEAD, Server
from talon.text import load


def parse_args(argv: list[str] | None) -> Namespace:
    parser = Parser(prog="python -m talon.serving", description="Serve a converted checkpoint.")
    add = parser.add_argument
    add("--checkpoint_path", type=Path, default=DEMO, help="target file (convert_hf_checkpoint.py)")
    add("--draft_checkpoint_path", default="none", help="head file, or none")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets the network in")
    add("--port", type=int, default=8000, help="0: a free one")
    add("--api_key", default="", help="what clients must send; without it everyone may ask")
    add("--tree", default="auto", help="as for generate.py")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="precision of computing: auto, fp32, fp16 or bf16")
    add("--max_seq_length", type=int, help="context to provide for (default: at most 4096)")
    add("--no_compile", dest="compile", action="store_false", help="run eagerly")
    return parser.parse_args(argv)


def make_server(args: Namespace) -> Server:
    """Load the model, and compile whatever a request may need."""
    path, head = args.checkpoint_path, args.draft_checkpoint_path
    engine = load(
        path, None if head == "none" else head, tree=args.tree, device=args.device,
        dtype=args.dtype, max_seq_length=args.max_seq_length, compile=args.compile, tune="measure",
    )  # fmt: skip
    if engine.tokenizer is None:
        raise ValueError(f"no tokenizer next to {path}: copy tokenizer.json there")
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 40)) if args.compile else ():
        engine.warm_up(SamplingConfig(temperature, top_k))
    mode = engine.card["quantization"] or engine.card["dtype"]
    how = f"{path.name}, {mode}, tree {engine.card['tree']}"
    note(f"{how}, on {engine.card['device']}")
    card = {"model": path.resolve().parent.name, "system_fingerprint": how}
    return Server(engine, card, args.api_key, local=args.host in LOCAL)


async def serve(server: Server, listening: socket.socket) -> None:
    """Until a signal comes; then the text under way ends with its round."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await asyncio.start_server(server.connected, sock=listening, limit=MOST_HEAD)
    note("serving at http://{}:{}".format(*listening.getsockname()))
    await ended.wait()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        listening = socket.create_server((args.host, args.port))
    except (OSError, OverflowError) as error:
        given = f"--host {args.host} --port {args.port}"
        raise ValueError(f"{given} cannot be listened at ({error}): give another") from None
    asyncio.run(serve(make_server(args), listening))
    return 0


if __name__ == "__main__":
    run(main)
