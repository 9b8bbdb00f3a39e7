"""."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch import Tensor


def guards_of_arguments(guards: list) -> list[bool]:
    """Which of a region's guards to keep: those of the arguments themselves (`rows`, `nodes[0]`)
    and of shapes and global state, which have no name.

    Those of globals and of what hangs on an object (`model.layers`, `cache.data`) are dropped: to
    look at every weight again would take a noticeable part of a round. A decoder never replaces
    them; a weight or a hook put in later is not seen, which takes a new Decoder."""
    return [not guard.is_global and "." not in guard.name for guard in guards]


INDUCTOR_OPTIONS = {
    # On a CPU the sum of one long row would be split over threads, that of a row among others not:
    # pieces of at least this many elements keep their numbers equal, and forks few.
    "cpp.min_chunk_size": 16384,
    "guard_filter_fn": guards_of_arguments,
    # What the graph's own operators return has the sizes that it was compiled for.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
}


def compile_region(function: Callable) -> Callable:
    """One compilation per shape; the length bucket is dynamic, and never a fallback to eager inside
    a region.

    Tuning and measuring run many trees in one process, so many shapes are no sign of a mistake
    here."""
    # Compiled code is kept per code object and found by trying one after another: a copy of its own
    # keeps a decoder from searching through what other decoders of the process compiled.
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    # An argument of torch.compile in newer releases only.
    torch._dynamo.config.recompile_limit = 256
    # torch.compile takes entries out of the options that it is given, hence a dict of its own.
    return torch.compile(own, fullgraph=True, dynamic=False, options=dict(INDUCTOR_OPTIONS))


class PhaseClock:
    """Seconds per phase of a round. On a GPU the marks are events inside the graph, read after its
    replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = {"draft": 0.0, "verify": 0.0}
        self.last = 0.0
        self.events: list[tuple[str, torch.cuda.Event]] = []
        self.on_gpu = device.type == "cuda"

    def start(self) -> None:
        if self.on_gpu:
            self.events = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """Everything since the last mark belongs to `phase`."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            self.events.append((phase, event))
            return
        now = time.perf_counter()
        if phase != "start":
            self.seconds[phase] += now - self.last
        self.last = now

    def read(self, events: list[tuple[str, torch.cuda.Event]]) -> None:
        """Add what the last replay of a graph measured; the graph must have finished."""
        for (_, before), (phase, after) in zip(events, events[1:], strict=False):
            self.seconds[phase] += before.elapsed_time(after) / 1e3


@dataclass
class Graph:
    """A captured round, and the timing events inside it."""

    cuda: torch.cuda.CUDAGraph
    events: list[tuple[str, torch.cuda.Event]]


@dataclass
class Launched:
    """A round under way: on a GPU its report is still being copied."""

    report: Tensor
    done: torch.cuda.Event | None = None
    events: list[tuple[str, torch.cuda.Event]] = field(default_factory=list)

    def tokens(self) -> list[int]:
        """Wait for the round; its new tokens, the bonus last."""
        if self.done is not None:
            self.done.synchronize()
        count, *tokens = self.report.tolist()
        return tokens[:count]
