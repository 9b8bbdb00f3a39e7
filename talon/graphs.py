"""What is compiled, captured, replayed and timed.

Regions, not the whole model, are compiled: a transformer block serves all layers, a draft level all
levels. On a GPU the pieces of a round are then captured together in one CUDA graph. Leaves out:
what a round consists of (talon/decoder.py)."""

import functools
import gc
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor

from talon.cli import note


def guards_of_arguments(guards: list) -> list[bool]:
    """Which of a region's guards to keep: those of the arguments themselves (`above`, `at.length`,
    `features[0]`: of tuples also their members) and of shapes and global state, which have no name.

    Those of globals and of what hangs on an object (`head._modules`, `pick.seed`) are dropped: to
    look at every weight again would take a noticeable part of a round. A decoder never replaces
    them; a weight or a hook put in later is not seen, which takes a new Decoder."""
    tuples = {g.name for g in guards if g.has_value and isinstance(g.value, tuple)}

    def of_argument(name: str) -> bool:
        owner = name.partition("[")[0].rpartition(".")[0]  # "" for an argument, `at` for at.length
        return not owner or owner in tuples

    return [not guard.is_global and of_argument(guard.name) for guard in guards]


INDUCTOR_OPTIONS = {
    # On a CPU the sum of one long row would be split over threads, that of a row among others not:
    # pieces of at least this many elements keep their numbers equal, and forks few.
    "cpp.min_chunk_size": 16384,
    "guard_filter_fn": guards_of_arguments,
    # Nothing is decided by timing it: another answer would be other kernels, and other rounding.
    "shape_padding": False,
    # What the graph's own operators return has the sizes that it was compiled for.
    "size_asserts": False, "alignment_asserts": False, "scalar_asserts": False,
}  # fmt: skip


@functools.cache
def known_options() -> dict[str, object]:
    """Those that this release of torch knows; the others are left out, which is said once."""
    known = {"guard_filter_fn", *torch._inductor.list_options()}
    for name in sorted(INDUCTOR_OPTIONS.keys() - known):
        note(f"note: torch {torch.__version__} has no option {name}: left out")
    return {name: INDUCTOR_OPTIONS[name] for name in INDUCTOR_OPTIONS if name in known}


def compile_region(function: Callable) -> Callable:
    """One compilation per shape, and never a fallback to eager inside a region. Tuning and
    measuring run many trees in one process, so many shapes are no sign of a mistake here.
    ValueError, when it is called, where nothing can be compiled."""
    from torch._dynamo.exc import TorchDynamoException

    remove_broken_libraries()
    # Compiled code is kept per code object and found by trying one after another: a copy of its own
    # keeps a decoder from searching through what other decoders of the process compiled.
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    # An argument of torch.compile in newer releases only.
    torch._dynamo.config.recompile_limit = 256
    # torch.compile takes entries out of the options that it is given, hence a dict of its own.
    compiled = torch.compile(own, fullgraph=True, dynamic=False, options=dict(known_options()))

    def run(*arguments: object) -> object:
        try:
            return compiled(*arguments)
        except (TorchDynamoException, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            raise ValueError(
                f"torch.compile does not work here ({lines[0]}): it needs a C++ compiler such as "
                "g++ (CXX names another one), and on a GPU Triton too: install it, or run with "
                f"--no_compile; delete the cache {cache} if it is damaged"
            ) from error

    return run


@functools.cache
def remove_broken_libraries() -> None:
    """Remove what a compiler that was killed left cut short in torch's cache, whose place torch
    puts into the environment: it would be loaded, which crashes."""
    from filelock import FileLock, Timeout
    from torch._inductor.codecache import cache_dir, get_lock_dir

    for library in Path(cache_dir()).glob("*/*.so"):
        with library.open("rb") as file:
            head = file.read(64)
        if len(head) == 64 and not head.startswith(b"\x7fELF"):
            continue
        # An ELF file has a table of sections at its end.
        start, size, count = struct.unpack("<40xQ10xHH2x", head.ljust(64, b"\xff"))
        if library.stat().st_size < start + size * count:
            lock = Path(get_lock_dir(), f"{library.name.partition('.')[0]}.lock")
            with suppress(Timeout), FileLock(lock, timeout=0):  # locked: it is being compiled
                library.unlink(missing_ok=True)


def as_it_is(function: Callable) -> Callable:
    """Instead of `compile_region`, to run eagerly."""
    return function


Events = list[tuple[str, torch.cuda.Event]]


class PhaseClock:
    """Seconds per phase of a round; on a GPU by events inside the graph, read after its replay."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.events: Events = []
        self.last = 0.0
        self.reset()

    def reset(self) -> None:
        self.seconds = {"draft": 0.0, "verify": 0.0}

    def start(self) -> None:
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

    def read(self, events: Events, rounds: int) -> None:
        """Let the last replay of a graph, by now finished, stand for all: reading each waits."""
        for (_, before), (phase, after) in zip(events, events[1:], strict=False):
            self.seconds[phase] += rounds * before.elapsed_time(after) / 1e3


@dataclass
class Graph:
    """A captured round, and the timing events inside it."""

    cuda: torch.cuda.CUDAGraph
    events: Events


class Recorder:
    """Captures the rounds of a decoder, all in one pool of memory: no two run at once, and what a
    round leaves lies in the decoder's own buffers."""

    def __init__(self, clock: PhaseClock, compiled: bool) -> None:
        self.clock, self.pool = clock, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        # Newer releases can tell at a replay that an input was freed; but they watch the capture by
        # a dispatch mode, under which compiled regions refuse to run.
        known = "check_input_liveness" in signature(torch.cuda.graph).parameters
        self.options = {"check_input_liveness": True} if known and not compiled else {}

    def capture(self, step: Callable[[], None], state: Sequence[Tensor]) -> Graph:
        """Record a round. It is rehearsed first, which compiles: the rehearsal may write slots that
        are not committed, and `state` is given back what it held."""
        before = [tensor.clone() for tensor in state]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # to destroy a dead decoder's graphs now would break the capture
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, **self.options):
                step()
        finally:
            if collecting:
                gc.enable()
        return Graph(graph, self.clock.events)


@dataclass
class Launched:
    """A round under way: on a GPU its result is still being copied."""

    result: Tensor  # int64 [1 + tokens]: how many are new, then the tokens, padded
    done: torch.cuda.Event | None = None
    events: Events = field(default_factory=list)

    def tokens(self) -> list[int]:
        """Wait for the round; its new tokens, the bonus last."""
        if self.done is not None:
            self.done.synchronize()
        count, *tokens = self.result.tolist()
        return tokens[:count]


def replay(graph: Graph, result: Tensor) -> Launched:
    """Start a captured round, and the copy of what it will leave in `result` to the host."""
    graph.cuda.replay()
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    host.copy_(result, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return Launched(host, done, graph.events)
