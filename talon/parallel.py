"""Several cards: a process each, started by torchrun, and its part of a target.

    torchrun --standalone --nproc_per_node 2 generate.py --checkpoint_path F ...

A process holds some outputs of each layer's matrices: its heads of wqkv, its stretch of gate and of
up, its share of wo and w2, which read and return what all processes have. Nothing is added up
across processes: each number is computed by one of them, as one alone computes it, so that bits are
equal in every precision. (Megatron-LM, arXiv 1909.08053, cuts wo and w2 by inputs: two exchanges
instead of four, but other sums, and rows that are rounded in parts.) The rest is whole everywhere,
and a choice is a function of seed and position: all compute the same round, the first one speaks.
Imported under torchrun only. Leaves out several machines, and several texts at a time."""

import ctypes
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, library, nn

from model import Attention, ModelConfig, Transformer
from talon.checkpoint import Checkpoint, TensorSpec, open_safetensors

OUTPUTS = ("--json", "--profile", "--out")  # which the first process writes
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # as torch names it


@library.custom_op("talon::gather", mutates_args=())
def gather(x: Tensor, width: int) -> Tensor:
    """[T, width]: what all P processes hold in the columns x [T, K], those of the last ones behind
    what is there already where P * K > width (as `share` says)."""
    rows, held = x.shape
    parts = x.new_empty((dist.get_world_size() * rows, held))
    all_gather(parts, x.contiguous())
    ends = [min(held * rank, width) for rank in range(dist.get_world_size())]
    known = [end - share(width, held, rank) for rank, end in enumerate(ends)]
    return torch.cat([y[:, n:] for y, n in zip(parts.split(rows), known, strict=True)], 1)


gather.register_fake(lambda x, width: x.new_empty((x.shape[0], width)))


def share(size: int, held: int, rank: int) -> int:
    """Where the share of a process begins, which holds `held` of `size`: no share is shorter."""
    return min(held * rank, size - held)


def check_equal(value: bytes, complaint: str) -> None:
    """ValueError in every process, should `value` not be the same in all."""
    if gather(torch.tensor([[zlib.crc32(value)]]), dist.get_world_size()).unique().numel() > 1:
        raise ValueError(complaint)


class GatheredRows(nn.Module):
    """A shared layer of a GPU, as the layers there use one: it takes rows as they are."""

    form, factors, group = "plain", None, 0

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.layer, self.outputs = layer, outputs

    def multiply(self, rows: tuple[Tensor, None], end: str, residual: Tensor) -> Tensor:
        return residual + gather(self.layer(gather(rows[0], self.layer.inputs)), self.outputs)


@dataclass(frozen=True)
class PartConfig(ModelConfig):
    """What one process computes; heads that cannot be divided evenly are computed twice."""

    whole: ModelConfig | None = None

    @classmethod
    def of(cls, whole: ModelConfig, count: int) -> "PartConfig":
        """A part of `whole`, one of so many."""
        groups = -(-whole.n_kv_head // count)
        heads, inner = groups * whole.n_head // whole.n_kv_head, whole.intermediate_size // count
        less = {"n_head": heads, "n_kv_head": groups, "intermediate_size": inner}
        return cls(**vars(whole) | less, whole=whole)


class PartTransformer(Transformer):
    """What one process holds of a target."""

    def __init__(self, config: PartConfig) -> None:
        super().__init__(config)
        c, outputs = config.whole, config.dim // dist.get_world_size()
        for layer in self.layers:
            layer.attention.wo = nn.Linear(c.n_head * c.head_dim, outputs, c.o_bias)
            layer.feed_forward.w2 = nn.Linear(c.intermediate_size, outputs, c.mlp_bias)

    @torch.inference_mode()
    def connect(self) -> None:
        """Once the layers are those of the device. ValueError where equal rows give other bits."""
        for layer in self.layers:
            attention, feed_forward = layer.attention, layer.feed_forward
            if not isinstance(attention, Attention):  # but of talon/kernels/gpu_layers.py
                attention.wo = GatheredRows(attention.wo, self.config.dim)
                feed_forward.w2 = GatheredRows(feed_forward.w2, self.config.dim)
                feed_forward.fused = True
                continue
            for shared in (attention.wo, feed_forward.w2):
                shared.register_forward_pre_hook(lambda m, rows: gather(*rows, m.in_features))
                shared.register_forward_hook(lambda m, _, y: gather(y, self.config.dim))
        rows = self.tok_embeddings(torch.arange(4, device=self.norm.weight.device))
        bits = self.output(self.norm(rows)).float().cpu().numpy().tobytes()
        check_equal(bits, "the processes compute different bits: give them equal hardware")

    def confirm(self, tokens: list[int]) -> list[int]:
        """The new tokens of a round, if all processes have found the same."""
        advice = "give them equal flags and hardware"
        check_equal(str(tokens).encode(), f"the processes found different tokens: {advice}")
        return tokens


@dataclass(frozen=True)
class Part(Checkpoint):
    """A target's file, of which a process reads its share."""

    processes: int = 1
    # Of a tensor whose rows are shared: the sections that they fall into, and how many it holds.
    sections: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        if name not in self.sections:
            return super().tensor(name)
        # Opened for this one: what a mapping has read counts as memory until it is closed.
        stored, spec = open_safetensors(self.path).get_slice(name), self.specs[name]
        part, before, done = torch.empty(spec.shape, dtype=spec.dtype), 0, 0
        for size, held in self.sections[name]:
            start = before + share(size, held, dist.get_rank())
            part[done : done + held] = stored[start : start + held]
            before, done = before + size, done + held
        return part


def part_of(
    file: Checkpoint, c: ModelConfig, head: Checkpoint | None
) -> tuple[Checkpoint, ModelConfig]:
    """This process's part of a target. ValueError in all processes where they were given different
    files, or more processes than can share it."""
    count = dist.get_world_size()
    for each in filter(None, (file, head)):
        stored = open_safetensors(each.path)  # and closed again
        rows = (stored.get_slice(name)[:1].flatten() for name in each.specs)
        seen = b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)
        seen += repr((each.config, each.specs)).encode()
        check_equal(seen, "the processes read different checkpoints: give all the same files")
    fits = [n for n in range(1, c.n_kv_head + 1) if c.dim % n == c.intermediate_size % n == 0]
    if count not in fits:
        raise ValueError(
            f"{count} processes cannot share {file.path.name}, {c.n_kv_head} key/value heads, "
            f"hidden size {c.dim} and intermediate size {c.intermediate_size}, which they must "
            f"divide: give --nproc_per_node {', '.join(map(str, fits))}"
        )
    part = PartConfig.of(c, count)
    q, k = (
        (x * c.head_dim, y * c.head_dim)
        for x, y in ((c.n_head, part.n_head), (c.n_kv_head, part.n_kv_head))
    )
    known = {"wqkv": [q, k, k], "w13": [(c.intermediate_size, part.intermediate_size)] * 2}
    known |= {"wo": [(c.dim, c.dim // count)], "w2": [(c.dim, c.dim // count)]}
    specs, sections = dict(file.specs), {}
    for name, spec in file.specs.items():
        _, layer, kind = f"..{name}".rsplit(".", 2)
        if layer in known and kind != "smoothing":  # which belongs to the inputs
            sections[name] = known[layer]
            held = sum(held for _, held in known[layer])
            specs[name] = TensorSpec(spec.dtype, (held, *spec.shape[1:]))
    same = {each.name: getattr(file, each.name) for each in fields(file)}
    return Part(**same | {"specs": specs}, processes=count, sections=sections), part


# ---------------------------------------------------------------- the processes


def join() -> dist.Store:
    """Meet the other processes. None of them outlives torchrun, nor a signal by 5 seconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # when torchrun ends: PR_SET_PDEATHSIG
    heard, told = os.pipe()  # a signal is heard of while the main thread waits for the others, too
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    threading.Thread(target=leave_late, args=(heard,), daemon=True).start()
    if "RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set but RANK is not: start several processes with torchrun")
    card, cards = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if 0 < cards <= card:
        raise ValueError(f"torch finds {cards} GPUs: give --nproc_per_node {cards} or less")
    if cards:
        torch.cuda.set_device(card)
    try:
        store, rank, count = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
        backend = "cpu:gloo,cuda:nccl" if cards else "gloo"
        years = timedelta(days=999)  # a conversation waits; a process that ends is noticed at once
        dist.init_process_group(backend, timeout=years, store=store, rank=rank, world_size=count)
    except (RuntimeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0][:200]
        advice = "give torchrun --standalone, or another --master_port"
        raise ValueError(f"the processes cannot meet ({why}): {advice}") from None
    return store


def leave_late(heard: int) -> None:
    number = os.read(heard, 1)[0]
    time.sleep(5)
    os._exit(128 + number)


def hear(read: Callable[[], str]) -> str:
    """What the first process reads from standard input."""
    said = [None if dist.get_rank() else read()]
    dist.broadcast_object_list(said)
    return said[0]


def tells(store: dist.Store) -> bool:
    """Whether this process is the one to say what happened: the first that asks."""
    try:
        return store.add("told", 1) == 1
    except RuntimeError:  # its owner is gone: torchrun, or without it the first process
        return dist.get_rank() == int("TORCHELASTIC_RUN_ID" not in os.environ)


def without_outputs(words: list[str]) -> list[str]:
    """A command line that writes no file."""
    rest, kept = iter(words), []
    for word in rest:
        if word in OUTPUTS:
            next(rest, None)  # its value
        elif not word.startswith(OUTPUTS):  # --json=FILE
            kept.append(word)
    return kept


def one_of_several(main: Callable[[list[str]], int]) -> Callable[[], int]:
    """A command's main as that of one process of several. The first one speaks; what ends one ends
    all, and is said once."""

    def run() -> int:
        store, errors, silence, words = join(), sys.stderr, open(os.devnull, "w"), sys.argv[1:]
        stdin = sys.stdin
        sys.stdin = SimpleNamespace(
            read=lambda: hear(stdin.read), readline=lambda: hear(stdin.readline)
        )
        if dist.get_rank():
            sys.stdout = sys.stderr = silence
            words = without_outputs(words)
        try:
            if "--retune" in words:
                raise ValueError("--retune measures in one process: run it without torchrun")
            code = main(words)
            if code < 128:  # not interrupted: none leaves before all are done
                check_equal(b"", "")
            return code
        except BaseException as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends one when any has ended
            sys.stderr = errors if tells(store) else silence
            ended = isinstance(error, KeyboardInterrupt) and error.args == (signal.SIGTERM,)
            if ended or isinstance(error, RuntimeError) and "onnection" in str(error):
                why = "it was killed, perhaps for memory, or torchrun was told to end"
                raise ValueError(f"another process has ended: {why}") from None
            raise
        finally:
            dist.destroy_process_group()

    return run
