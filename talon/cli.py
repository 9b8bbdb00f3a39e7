"""What every command line of the project shares: one-line errors and exit codes.

0 success, 1 a check failed or the model computes NaN, 2 bad input (one line on standard error), 130
interrupted (143 or 129 where a signal ended it, as a shell says)."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
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
    """Shows defaults, but not that there is none, nor whether a switch is off."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default is None or isinstance(action.default, bool):
            return action.help or ""
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line that says where help is."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (see {self.prog} --help)\n")


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


def one_line(error: Exception) -> str:
    """A mistake in one line. What the system refused has a path and a reason, but no advice."""
    reason = getattr(error, "strerror", None)
    if not reason:
        return " ".join(str(error).split())
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{reason}: check the path, its permissions and the free space"


def check_output(flag: str, path: Path, inputs: list[Path]) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    given, path = f"{flag} {path}", Path(os.path.realpath(path))
    try:
        if path.is_dir():
            raise ValueError(f"{given} is a directory: give the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"{given}: directory {path.parent} does not exist: create it first")
        if path.exists() and not path.is_file():
            raise ValueError(f"{given} is no ordinary file: give the name of a file to write")
        if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
            raise ValueError(
                f"{given} is an input of this run and would be overwritten: choose another name"
            )
        probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{given} cannot be written ({error.strerror}): choose a place that can"
        ) from None


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal that ends the process becomes Ctrl-C: what is half done is taken back."""
    raise KeyboardInterrupt(number)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command's main and leave with its exit code; a user's mistake is never a traceback."""
    prepare_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, interrupt)
    try:
        code = main()
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        abandon_stdout()
        if isinstance(error, BrokenPipeError):  # the reader left, as in `| head`
            sys.exit(0)
        note(f"error: {one_line(error)}")
        code = 2
    except FloatingPointError as error:
        abandon_stdout()
        note(f"error: {one_line(error)}")
        code = 1
    except KeyboardInterrupt as error:
        note("")
        code = 128 + (error.args[0] if error.args else signal.SIGINT)
    sys.exit(code)
