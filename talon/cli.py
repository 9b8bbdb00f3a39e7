"""What every command line of the project shares: one-line errors and exit codes.

0 success, 1 a check failed or the model computes NaN, 2 bad input (one line on standard error), 130
interrupted (143 or 129 where a signal ended it, as a shell says)."""

import argparse
import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

DEMO = Path("checkpoints/SmolLM2-135M-Instruct/talon.safetensors")


def note(text: str) -> None:
    """Everything but a command's result goes to standard error; what that cannot take is lost."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def announce(text: str) -> None:
    """A command's last word on standard output; its work is done, even where that is full."""
    try:
        print(text, flush=True)
    except OSError as error:
        abandon_stdout()
        note(f"note: standard output cannot be written ({error.strerror}): {text}")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none (or an empty one), nor whether a switch is off."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default in (None, "", []) or isinstance(action.default, bool):
            return action.help or ""
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line that says where help is."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (see {self.prog} --help)\n")


def add_files(add: Callable) -> None:
    add("--checkpoint_path", type=Path, default=DEMO, help="target file (convert_hf_checkpoint.py)")
    add("--draft_checkpoint_path", default="none", help="head or smaller target, or none")


def add_running_options(parser: Parser) -> Callable:
    """How the files are run, as `load` in talon/text.py takes it. Returns what adds more of it."""
    group = parser.add_argument_group("running")
    add = group.add_argument
    trees = (
        "auto, none, lookahead:W,N,G, lookup:K, or with a head chain:K, static, medusa, "
        "dynamic:nodes=N,levels=L,top_k=K, FILE.json, these also with +lookup:K"
    )
    add("--tree", default="auto", help=trees)
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="precision of computing: auto, fp32, fp16 or bf16")
    add("--keep_head", action="store_true", help="do not round the head to int8 on a GPU")
    add("--max_seq_length", type=int, help="context to provide for (default: what is needed)")
    compiling = group.add_mutually_exclusive_group()
    compiling.add_argument("--compile", action="store_true", default=True, help="compile")
    compiling.add_argument("--no_compile", dest="compile", action="store_false", help="run eagerly")
    return add


def prepare_streams() -> None:
    """Give the program streams that never fail on a character, whatever locale and shell it has."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell, as in `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def abandon_stdout() -> None:
    """Drop what standard output could not take, or the interpreter would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which Python, torch, the system and its loader each say their way."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    said = ("allocate memory", "out of memory", "failed to map", "start new thread")
    return isinstance(error, RuntimeError | ImportError) and any(w in str(error) for w in said)


def one_line(error: BaseException) -> str:
    """A mistake in one line. What the system refused has a path and a reason, but no advice."""
    if is_out_of_memory(error):
        said = " ".join(str(error).split())[:200] or "MemoryError"
        return (
            f"out of memory ({said}): free some, raise the limit (ulimit -v), or take a checkpoint "
            "in int8 or int4 or a smaller --max_seq_length"
        )
    reason = getattr(error, "strerror", None)
    if not reason:
        return " ".join(str(error).split())
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{reason}: check the path, its permissions and the free space"


def check_place(given: str, real: Path) -> None:
    """Refuse a place where no file can appear. real: `given` with its links followed."""
    if not real.parent.is_dir():
        raise ValueError(f"{given}: directory {real.parent} does not exist: create it first")
    if real.exists() and not real.is_file():
        what = "a directory" if real.is_dir() else "no ordinary file"
        raise ValueError(f"{given} is {what}: give the name of a file")


def check_output(flag: str, path: Path, inputs: list[Path]) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    given, path = f"{flag} {path}", Path(os.path.realpath(path))
    try:
        check_place(given, path)
        if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
            raise ValueError(f"{given} is an input of this run: choose another name")
        probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        fault = f"{given} cannot be written ({error.strerror})"
        raise ValueError(f"{fault}: choose a place that can") from None


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal that ends the process becomes Ctrl-C: what is half done is taken back."""
    raise KeyboardInterrupt(number)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command's main and leave with its exit code; a user's mistake is never a traceback."""
    prepare_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, interrupt)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
        sys.stdout.flush()
    except Exception as error:
        known = isinstance(error, ValueError | OSError | FloatingPointError)
        if not (known or is_out_of_memory(error)):
            raise
        abandon_stdout()
        if isinstance(error, BrokenPipeError):  # the reader left, as in `| head`
            sys.exit(0)
        note(f"error: {one_line(error)}")
        code = 1 if isinstance(error, FloatingPointError) else 2
    except KeyboardInterrupt as error:
        note("")
        code = 128 + (error.args[0] if error.args else signal.SIGINT)
    sys.exit(code)


def start(command: str, shared: bool = False) -> NoReturn:
    """Import a command's module, which takes seconds, and run its main: Ctrl-C and too little
    memory end the imports in a line, too. shared: several processes may share its target."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    try:
        if 0 <= limit < 10**9:  # libraries that torch imports would end this in an abort
            raise MemoryError(f"the limit is {limit / 1e9:.2f} GB, and torch alone needs 1 GB")
        main = import_module(command).main
        if shared and os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun says
            main = import_module("talon.parallel").one_of_several(main)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not is_out_of_memory(error):
            raise
        note(f"error: {one_line(error)}")
        os._exit(2)
    run(main)
