"""What the benchmark compares: every target of ours, plainly, with every head and tree and with
lookup; and other programs on the same model.

A method has a name, the target that it runs, the memory that it holds and the trees that it uses;
`start` gives a text under way, of which every step is a forward, and `result` what came of it.

Leaves out: the measuring (benchmark.py), what is made of the numbers (report.py)."""

import importlib.util
import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from eagle_draft import DraftHead
from model import Transformer
from talon.cli import note
from talon.decoder import Decoder, Generation, RoundStats
from talon.drafters.source import module_bytes
from talon.loading import (
    Files,
    fit_tree,
    gpu_weights,
    load_head,
    load_target,
    pick_device,
    pick_dtype,
    precision_name,
)
from talon.records import moved_bytes, peak_memory
from talon.sampling import SamplingConfig
from talon.trees import parse_tree
from talon.tuning.choice import auto_tree

TREES = ("chain:3", "static", "dynamic:nodes=24,levels=5,top_k=8")

# Other programs, and the package of each.
PEERS = {
    "transformers": "transformers",
    "transformers-lookup": "transformers",
    "llama.cpp": "llama_cpp",
    "llama.cpp-lookup": "llama_cpp",
}

INSTALL = "pip install 'transformers' 'llama-cpp-python'   (the extra: pip install -e '.[bench]')"


class Task(NamedTuple):
    """A prompt as token ids, and how to go on behind it."""

    ids: list[int]
    sampling: SamplingConfig
    budget: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Decoded:
    """One method on one prompt. Tokens of the first forward count as prefill."""

    tokens: list[int]
    stats: RoundStats
    moved_bytes: float = 0.0  # read by all rounds together, as far as known
    peak_memory_bytes: int = 0


# ---------------------------------------------------------------- ours


class TalonMethod:
    """One target and draft source of ours, with the decoder of every temperature: `auto` chooses
    one tree for temperature 0 and one for those above."""

    own_sampler = False

    def __init__(
        self, name: str, target: str, decoders: dict[float, Decoder], family: str = ""
    ) -> None:
        """family: of the head, or "model"; empty without one."""
        self.name, self.target, self.decoders, self.family = name, target, decoders, family
        self.plain = name == f"{target} plain"
        self.trees = {temperature: decoder.tree.name for temperature, decoder in decoders.items()}
        self.memory_bytes = max(map(held_bytes, decoders.values()))

    def start(self, task: Task) -> "TalonText":
        return TalonText(self.decoders[task.sampling.temperature], *task)


class TalonText(Generation):
    """A text that is timed with its own prefill, whatever is cached."""

    peak_memory_bytes = 0

    def __iter__(self) -> Iterator:
        device = self.decoder.device
        self.decoder.forget()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield from super().__iter__()
        self.peak_memory_bytes = peak_memory(device)

    def result(self) -> Decoded:
        return Decoded(self.tokens, self.stats, moved_bytes(self), self.peak_memory_bytes)


def held_bytes(decoder: Decoder) -> int:
    """Of the weights and caches that a decoder holds."""
    return sum(map(module_bytes, (decoder.model, decoder.cache, *decoder.drafter.held)))


class Head(NamedTuple):
    name: str
    files: Files  # its own and its target's
    module: DraftHead


class Target(NamedTuple):
    """A target in memory with the heads that belong to it."""

    name: str
    files: Files
    model: Transformer
    heads: list[Head]

    @property
    def path(self) -> Path:
        return self.files.target.path


def load_all(args: Namespace, opened: list[Files]) -> list[Target]:
    """Every target with every head, each loaded once."""
    device, targets = pick_device(args.device), []
    dtype = pick_dtype(args.dtype, device)
    for files in opened:
        model, heads = load_target(files, device, dtype), []
        for path in args.draft_checkpoint_path:
            with_head = files.with_head(path)
            # A file's name, or its folder's where that says nothing or is taken.
            names = [path.stem] if path.stem != "talon" else []
            name = first_free([*names, path.parent.name, str(path)], heads)
            heads.append(Head(name, with_head, load_head(with_head, model, device, dtype)))
        name = precision_name(files.target, dtype)
        name = first_free([name, f"{name} ({files.target.path})"], targets)
        targets.append(Target(name, files, model, heads))
    return targets


def first_free(names: list[str], taken: list[Head] | list[Target]) -> str:
    return next(name for name in names if name not in [other.name for other in taken])


def our_methods(args: Namespace, targets: list[Target], context: int) -> Iterator[TalonMethod]:
    """Plain decoding of every target, every head with every tree, and lookup."""
    for target in targets:
        sources: list[tuple[str, str, Head | None]] = [("plain", "none", None)]
        for head, tree in itertools.product(target.heads, args.tree or TREES):
            sources.append((f"{head.name} {tree}", tree, head))
        if args.lookup:
            sources.append((f"lookup:{args.lookup}", f"lookup:{args.lookup}", None))
        if args.lookahead:
            sources.append((f"lookahead:{args.lookahead}", f"lookahead:{args.lookahead}", None))
        for name, tree, head in sources:
            try:
                decoders = make_decoders(args, target, tree, head, context)
            except ValueError as error:
                if len(target.heads) == 1 or head is None:
                    raise
                note(f"without {name}: {error}")
                continue
            family = head and getattr(head.files.head_config, "family", "model")
            yield TalonMethod(f"{target.name} {name}", target.name, decoders, family or "")


def make_decoders(
    args: Namespace, target: Target, name: str, head: Head | None, context: int
) -> dict[float, Decoder]:
    """The decoder of every temperature. Only `auto` makes more than one."""
    module, weight = head and head.module, target.model.norm.weight
    gpu = gpu_weights(target.files, weight.device, weight.dtype)
    model = target.model
    if name != "auto":
        asked = None if name == "preset" else parse_tree(name)
        tree = fit_tree(asked, head and head.files.head_config, gpu)
        decoder = Decoder(model, context, module, tree, args.compile)
        return dict.fromkeys(args.temperature, decoder)
    decoders = {}
    for temperature in args.temperature:
        sampling = SamplingConfig(temperature)
        choice = auto_tree(head.files, model, module, sampling, args.compile, measure=True)
        tree = choice.tree if choice else fit_tree(None, head.files.head_config, gpu)
        decoders[temperature] = Decoder(model, context, module, tree, args.compile)
    return decoders


# ---------------------------------------------------------------- other programs


class Peer:
    """Another program. Its `decode` gives the new tokens of a task, and tells `mark` after every
    forward how many there are."""

    plain, own_sampler = False, True

    def __init__(self, name: str, memory_bytes: int) -> None:
        self.name = self.target = name  # it takes its turn alone
        self.memory_bytes, self.trees = memory_bytes, {}

    def start(self, task: Task) -> "PeerText":
        return PeerText(self, task)


class PeerText:
    def __init__(self, peer: Peer, task: Task) -> None:
        self.peer, self.task = peer, task
        self.tokens: list[int] = []
        # The start, then the end of every forward, with the tokens by then.
        self.marks: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator:
        self.mark(0)
        self.tokens = self.peer.decode(self.task, self.mark)
        yield self.tokens

    def mark(self, count: int) -> None:
        self.marks.append((time.perf_counter(), count))

    def result(self) -> Decoded:
        (started, _), (first, count), *_, (last, _) = [*self.marks, self.marks[-1]]
        stats = RoundStats(prefill_s=first - started, decode_s=last - first)
        stats.rounds, stats.emitted = len(self.marks) - 2, max(len(self.tokens) - count, 0)
        return Decoded(self.tokens, stats)


class TransformersPeer(Peer):
    """transformers' own generate, optionally with its prompt lookup."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        super().__init__(name, sum(p.numel() * p.itemsize for p in model.parameters()))
        self.model = model

    def decode(self, task: Task, mark: Callable[[int], None]) -> list[int]:
        ids, sampling, budget, stop_ids = task
        device = self.model.device

        def watch(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that never stops: called once a forward."""
            if device.type == "cuda":  # the forward is only queued
                torch.cuda.synchronize(device)
            mark(input_ids.shape[1] - len(ids))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=device)

        options: dict = {"do_sample": False, "top_k": None, "top_p": None, "temperature": None}
        if not sampling.greedy:
            options = {"do_sample": True, "top_k": 0, "top_p": 1.0}
            options["temperature"] = sampling.temperature
            torch.manual_seed(sampling.seed)
        if self.name.endswith("lookup"):
            options["prompt_lookup_num_tokens"] = 10
        prompt = torch.tensor([ids], device=device)
        with torch.inference_mode():
            found = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=budget,
                stopping_criteria=[watch],
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=0,
                **options,
            )
        return found[0, len(ids) :].tolist()[:budget]


class LlamaCppPeer(Peer):
    """llama.cpp through llama-cpp-python, on a GGUF file of the same model."""

    def __init__(
        self, path: Path, context: int, device: torch.device, lookup: bool = False
    ) -> None:
        """lookup: with its own prompt lookup, whose forwards it does not tell apart."""
        from llama_cpp import Llama, llama_supports_gpu_offload

        name = "llama.cpp-lookup" if lookup else "llama.cpp"
        super().__init__(f"{name} {path.stem.rpartition('.')[2]}", path.stat().st_size)
        on_gpu = device.type == "cuda"
        if on_gpu and not llama_supports_gpu_offload():
            raise ValueError("llama.cpp was built without a GPU here and would run on the CPU")
        options = dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
        options |= {"n_ctx": context, "n_gpu_layers": -1 if on_gpu else 0}
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=10)
        self.llama = Llama(str(path), **options, verbose=False)

    def decode(self, task: Task, mark: Callable[[int], None]) -> list[int]:
        ids, sampling, budget, stop_ids = task
        self.llama.reset()
        self.llama.set_seed(sampling.seed % 2**31)
        tokens: list[int] = []
        temperature = 0.0 if sampling.greedy else sampling.temperature
        options = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        stream = self.llama.generate(ids, repeat_penalty=1.0, **options)
        for token in stream:
            tokens.append(int(token))
            mark(len(tokens))
            if len(tokens) == budget or token in stop_ids:
                break
        stream.close()
        return tokens


def peer_names(asked: str) -> list[str]:
    """What --peers asks for; ValueError if that is not known, or named and not installed."""
    names = [] if asked == "none" else list(PEERS) if asked == "auto" else asked.split(",")
    for name in names:
        if name not in PEERS:
            known = ", ".join(PEERS)
            raise ValueError(f"peer {name!r} is not known: give auto, none or some of {known}")
        if asked != "auto" and importlib.util.find_spec(PEERS[name]) is None:
            raise ValueError(f"{name} is not installed: {INSTALL}")
    return list(dict.fromkeys(names))


def open_peers(args: Namespace, target: Target, context: int) -> list[Peer]:
    """The peers on the files next to a target of ours, on its device and in its precision. `auto`
    names those that cannot run instead of refusing them."""
    opened: dict[str, Peer] = {}
    if args.peers != "none" and target.files.target.processes > 1:
        raise ValueError("peers run in one process: give --peers none under torchrun")
    for name in peer_names(args.peers):
        try:
            if importlib.util.find_spec(PEERS[name]) is None:
                raise ValueError(f"not installed: {INSTALL}")
            if name.startswith("llama.cpp"):
                lookup = name.endswith("lookup")
                opened[name] = open_llama_cpp(args.gguf, target, context, lookup)
            else:
                opened[name] = open_transformers(name, target, opened.get("transformers"))
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            if args.peers != "auto":
                raise ValueError(f"peer {name}: {reason}") from None
            note(f"without {name}: {reason}")
    return list(opened.values())


def open_llama_cpp(gguf: Path | None, target: Target, context: int, lookup: bool) -> Peer:
    found = [gguf] if gguf else sorted(target.path.parent.glob("*.gguf"))
    if not found:
        raise ValueError(f"give a GGUF file with --gguf, or put one next to {target.path}")
    return LlamaCppPeer(found[0], context, target.model.norm.weight.device, lookup)


def open_transformers(name: str, target: Target, other: TransformersPeer | None) -> Peer:
    """other: the peer that has already loaded the same model."""
    if other is not None:
        return TransformersPeer(name, other.model)
    if not (target.path.parent / "config.json").is_file():
        raise ValueError(f"put the model's own config.json and weights next to {target.path}")
    from transformers import AutoModelForCausalLM

    weight = target.model.norm.weight
    model = AutoModelForCausalLM.from_pretrained(
        target.path.parent, dtype=weight.dtype, local_files_only=True
    )
    return TransformersPeer(name, model.to(weight.device))
