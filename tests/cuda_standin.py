"""A stand-in for a GPU: under it the code that is written for CUDA runs, as it is, on a CPU.

    with Gpu() as gpu:
        decoder = Decoder(model.to("cuda"), 600, head.to("cuda"), tree, compile=False)

What is made on "cuda" lies in ordinary memory, but says that it is there, and refuses to be mixed
with what is not. Where a GPU may hide a mistake, this one does not:

    what is launched, replays and copies to pinned memory, is done as late as can be: when the host
    waits for it or gives its stream more to do. Or with Gpu(fast=True) as early as can be: at once.
    Pinned memory holds garbage until something is copied there.

    A graph is a list of ATen calls on the very tensors of its capture, which changes nothing. What
    graphs keep in their pool is garbage before every replay. No graph holds an input alive.

    In a capture it is an error to wait for the device, to read the host's memory, and to destroy
    another graph.

Leaves out: compiled code, since torch.compile refuses to run under a dispatch mode, more devices
than one, and time: its clock counts the calls that graphs repeat."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda", 0)
DEVICE, IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__
READS = (Tensor.tolist, Tensor.numpy, Tensor.__repr__)  # of the memory itself, by no ATen call
MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
FROM_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy)
WAITS = (
    "item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal"
)  # fmt: skip
INDEXING = ("index", "index_put_", "_index_put_impl_")  # takes indices of the host, and waits
CARD = SimpleNamespace(L2_cache_size=6 << 20, multi_processor_count=82)
GARBAGE = 0x7F  # in every byte: 3.4e38 or NaN, and an index out of all bounds


class WrongUse(RuntimeError):
    """What a GPU would refuse, or take with undefined results."""


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def raw(storage: torch.UntypedStorage) -> Tensor:
    """Its bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


# ---------------------------------------------------------------- what torch.cuda is made of


class Stream:
    """Work in the order in which it was given."""

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.work, self.given, self.done = gpu, deque(), 0, 0

    def put(self, work: Callable[[], None]) -> int:
        """Returns the work's number, for `run`."""
        self.work.append(work)
        self.given += 1
        if self.gpu.fast:
            self.run()
        return self.given

    def run(self, until: int | None = None) -> None:
        until = self.given if until is None else until
        while self.done < until:
            self.done += 1
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
                self.work.popleft()()

    def wait_stream(self, other: "Stream") -> None:
        self.put(partial(other.run, other.given))

    def synchronize(self) -> None:
        self.gpu.wait()
        self.run()


class Event:
    def __init__(
        self, gpu: "Gpu", enable_timing: bool = False, blocking: bool = False,
        interprocess: bool = False, external: bool = False,
    ) -> None:  # fmt: skip
        self.gpu, self.timing, self.external = gpu, enable_timing, external
        self.stream, self.number = None, 0
        self.time, self.pending = None, 0  # when it happened last, and how often it still will

    def record(self, stream: Stream | None = None) -> None:
        if self.gpu.tape is not None:
            if not self.external:
                raise WrongUse("an event recorded in a capture says nothing outside of it")
            self.gpu.tape.mark(self)
            return
        self.stream, self.pending = stream or self.gpu.stream, self.pending + 1
        self.number = self.stream.put(self.happen)

    def happen(self) -> None:
        self.time, self.pending = self.gpu.clock, self.pending - 1

    def synchronize(self) -> None:
        """As on a GPU, nothing is waited for where nothing was recorded."""
        self.gpu.wait()
        if self.stream is not None:
            self.stream.run(self.number)

    def elapsed_time(self, end: "Event") -> float:
        if not (self.timing and end.timing) or None in (self.time, end.time):
            raise WrongUse("an event that takes no time, or was never recorded")
        if self.pending or end.pending:
            raise WrongUse("the time of an event that is still to happen")
        return end.time - self.time


class CUDAGraph:
    def __init__(self, gpu: "Gpu", keep_graph: bool = False) -> None:
        self.gpu, self.tape, self.handle, self.replays = gpu, None, None, 0

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:  # fmt: skip
        self.handle = pool or object()
        self.gpu.tape = Tape(self.gpu)

    def capture_end(self) -> None:
        gpu, tape = self.gpu, self.gpu.tape
        gpu.tape = None
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            tape.undo()
        if tape.broken:
            raise WrongUse(tape.broken)
        self.tape = tape
        gpu.pools.setdefault(self.handle, []).append(tape)
        gpu.captures.append(self)

    def pool(self) -> object:
        return self.handle

    def replay(self) -> None:
        if self.tape is None:
            raise WrongUse("this graph holds nothing")
        self.tape.start()
        self.gpu.stream.put(self.run)

    def run(self) -> None:
        for tape in self.gpu.pools[self.handle]:
            tape.spoil()
        self.tape.replay()
        self.replays += 1

    def __del__(self) -> None:
        if self.gpu.tape is not None:
            self.gpu.tape.broken = "a graph was destroyed while another one was captured"


class Tape:
    """A capture: ATen calls on actual tensors, and the events between them. Results are written
    where they were, so a value that lived in Python or a buffer that was re-allocated shows."""

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.calls, self.events, self.broken = gpu, [], [], ""
        self.own: dict[int, Tensor] = {}  # bytes of what was made in the capture: the pool's memory
        self.used = True  # it holds something
        self.results: dict[int, Tensor] = {}  # views too; whatever else is used is an input
        self.before: dict[int, tuple] = {}  # inputs that were written, and what they held

    def mark(self, event: Event) -> None:
        self.events.append(event)
        self.calls.append((event, None, None, None))

    def record(self, func: Callable, args: tuple, kwargs: dict) -> object:
        given = list(tensors((args, *kwargs.values())))
        writes = func._schema.is_mutable
        for value, argument in zip(args, func._schema.arguments, strict=False):
            told = argument.alias_info is not None and argument.alias_info.is_write
            if value is not None and (told or argument.name == "kv"):  # see `talon::linear`
                self.keep(value)
        result = func(*args, **kwargs)
        made = list(tensors(result))
        known = {tensor.untyped_storage()._cdata for tensor in given}
        new = [t.untyped_storage() for t in made if t.untyped_storage()._cdata not in known]
        self.own |= {storage._cdata: raw(storage) for storage in new}
        if new or writes:  # a view is one already
            args, kwargs = self.hold(args), {name: self.hold(v) for name, v in kwargs.items()}
            self.calls.append((func, args, kwargs, made))
        self.results |= {id(tensor): tensor for tensor in made}
        return result

    def keep(self, written: Tensor) -> None:
        storage = written.untyped_storage()
        if storage._cdata not in self.own and storage._cdata not in self.before:
            self.before[storage._cdata] = storage, storage.clone()

    def undo(self) -> None:
        """A capture runs nothing."""
        for storage, held in self.before.values():
            storage.copy_(held)
        self.before = {}

    def hold(self, value: object) -> object:
        """An argument with weak references to inputs."""
        if isinstance(value, Tensor):
            return value if id(value) in self.results else ref(value)
        return type(value)(map(self.hold, value)) if isinstance(value, list | tuple) else value

    def get(self, held: object) -> object:
        if isinstance(held, list | tuple):
            return type(held)(map(self.get, held))
        if not isinstance(held, ref):
            return held
        if (value := held()) is None:
            raise WrongUse("an input of a graph was freed")
        return value

    def start(self) -> None:
        for event in self.events:
            event.pending += 1

    def spoil(self) -> None:
        if self.used:
            for bytes_of_storage in self.own.values():
                bytes_of_storage.fill_(GARBAGE)
        self.used = False

    def replay(self) -> None:
        self.used = True
        for func, args, kwargs, made in self.calls:
            if isinstance(func, Event):
                func.happen()
                continue
            fresh = func(*self.get(args), **{name: self.get(v) for name, v in kwargs.items()})
            for old, new in zip(made, tensors(fresh), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)
            self.gpu.clock += 1.0


# ---------------------------------------------------------------- the device


class Calls(TorchDispatchMode):
    """Every ATen call."""

    def __init__(self, gpu: "Gpu") -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.gpu.call(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Every call of torch from Python, which still names its device."""

    def __init__(self, gpu: "Gpu") -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.gpu.function(func, args, dict(kwargs or {}))


class Gpu:
    """The device, and torch.cuda while it is entered."""

    def __init__(self, fast: bool = False) -> None:
        self.fast, self.chosen = fast, False
        self.here: WeakSet = WeakSet()  # storages on the device
        self.pinned: WeakSet = WeakSet()
        self.stream = Stream(self)  # the current one
        self.streams = [self.stream]
        self.tape: Tape | None = None  # of the capture under way
        self.making = False  # whether what the function under way makes is to be here
        self.pools: dict[object, list[Tape]] = {}
        self.captures: list[CUDAGraph] = []
        self.clock = 0.0

    def __enter__(self) -> "Gpu":
        answers = {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
            "set_device": self.choose, "get_device_name": lambda device=None: "stand-in",
            "get_device_capability": lambda device=None: (8, 6), "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (24 << 30, 24 << 30),
            "max_memory_allocated": lambda device=None: 0,
            "get_device_properties": lambda device=None: CARD,
            "Stream": self.new_stream, "Event": partial(Event, self), "stream": self.on,
            "CUDAGraph": partial(CUDAGraph, self), "graph_pool_handle": object,
            "current_stream": lambda device=None: self.stream, "synchronize": self.synchronize,
        }  # fmt: skip
        self.exits = ExitStack()
        for name, answer in answers.items():
            self.exits.enter_context(patch.object(torch.cuda, name, answer))
        # torch.cuda.graph is the real one.
        emptied = patch.object(torch._C, "_host_emptyCache", lambda: None, create=True)
        self.exits.enter_context(emptied)
        self.exits.enter_context(patch.object(torch.cuda.graph, "default_capture_stream", None))
        none = patch.object(torch.accelerator, "current_accelerator", lambda *args, **options: None)
        self.exits.enter_context(none)  # optimizers of newer releases ask it
        self.exits.enter_context(Calls(self))
        self.exits.enter_context(Functions(self))
        return self

    def __exit__(self, *error: object) -> None:
        self.exits.close()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self.here

    def choose(self, device: object) -> None:
        self.chosen = True

    def new_stream(self, device: object = None) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def wait(self) -> None:
        """The host waits for the device."""
        if self.tape is not None:
            raise WrongUse("nothing can be waited for in a capture")

    def synchronize(self, device: object = None) -> None:
        self.wait()
        for stream in self.streams:
            stream.run()

    def function(self, func: Callable, args: tuple, kwargs: dict) -> object:
        if func in (DEVICE, IS_CUDA) and self.holds(args[0]):
            return CUDA if func == DEVICE else True
        if func in MOVES:
            return self.move(func, args, kwargs)
        if func in READS and self.holds(args[0]):
            self.wait()
            self.stream.run()
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        there = is_cuda(device)
        if there:
            kwargs["device"] = "cpu"
            if func in FROM_HOST:
                self.wait()
        # What torch makes of its own accord is where the arguments are.
        like = device is None and any(map(self.holds, tensors((args, *kwargs.values()))))
        before, self.making = self.making, there or like
        try:
            result = func(*args, **kwargs)
        finally:
            self.making = before
        if there:
            self.here.update(tensor.untyped_storage() for tensor in tensors(result))
        if pinned:
            self.pinned.add(result.untyped_storage())
            raw(result.untyped_storage()).fill_(GARBAGE)
        return result

    def move(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Tensor.to and the like, across the border where it is asked for."""
        tensor, *options = args
        asked = {Tensor.cpu: ["cpu"], Tensor.cuda: ["cuda"]}.get(func, [*options, *kwargs.values()])
        asked = [option for option in asked if isinstance(option, str | torch.device)]
        if not asked or torch.device(asked[0]).type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        crosses = is_cuda(asked[0]) != self.holds(tensor)
        if crosses:
            self.wait()
            self.stream.run()
        options = ["cpu" if is_cuda(option) else option for option in options]
        kwargs = {k: "cpu" if is_cuda(option) else option for k, option in kwargs.items()}
        result = tensor.to(*options, **kwargs)
        if crosses and result.untyped_storage() is tensor.untyped_storage():
            result = result.clone()
        (self.here.add if is_cuda(asked[0]) else self.here.discard)(result.untyped_storage())
        return result

    def call(self, func: Callable, args: tuple, kwargs: dict) -> object:
        given, name = list(tensors((args, *kwargs.values()))), func.overloadpacket.__name__
        here = [self.holds(tensor) for tensor in given]
        if not (any(here) or (self.making and not given)):
            return func(*args, **kwargs)
        if name == "copy_" and not all(here):
            return self.copy(func, args, kwargs)
        alien = [t for t, inside in zip(given, here, strict=True) if not inside and t.dim()]
        if alien and not (name in INDEXING and here[0] and self.tape is None):
            raise WrongUse(f"{name}: tensors on the device and others")
        if self.tape is None:
            self.stream.run()
            result = func(*args, **kwargs)
        else:
            if name in WAITS:
                self.wait()
            result = self.tape.record(func, args, kwargs)
        self.here.update(tensor.untyped_storage() for tensor in tensors(result))
        return result

    def copy(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Between host and device."""
        self.wait()
        target, source, *later = args
        if self.holds(source) and any(later) and target.untyped_storage() in self.pinned:
            self.stream.put(lambda: target.copy_(source))
            return target
        self.stream.run()
        return func(*args, **kwargs)
