"""What one would use instead of Talon, behind the face that the benchmark measures: transformers
and llama.cpp.

Both come with the extra `bench`; a peer that is not installed, or whose model files are not there,
is named with what is missing. They get the same prompt ids, token budget and stop ids, and time
their own first token.

Leaves out: peers that need a GPU to start (vLLM, SGLang, exllama).
"""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sampling import SamplingConfig

NAMES = ("transformers", "transformers-lookup", "llama.cpp")
PACKAGES = {
    "transformers": "transformers",
    "transformers-lookup": "transformers",
    "llama.cpp": "llama_cpp",
}
INSTALL = "pip install 'transformers' 'llama-cpp-python'   (the extra: pip install -e '.[bench]')"


@dataclass
class Run:
    """One method on one prompt. `decode_s` and `decoded` cover what came after the first forward's
    token(s).
    """

    tokens: list[int]
    prefill_s: float
    decode_s: float
    decoded: int
    rounds: int
    accepted_by_depth: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    plain_rounds: int = 0
    moved_bytes: float = 0.0  # read by all rounds together, as far as known
    peak_memory_bytes: int = 0


def missing(name: str) -> str | None:
    """Why a peer cannot run here at all; None if its package is installed."""
    if name not in NAMES:
        raise ValueError(
            f"peer {name!r} is not known: give one of {', '.join(NAMES)}, auto or none"
        )
    if importlib.util.find_spec(PACKAGES[name]) is None:
        return f"{name} is not installed: {INSTALL}"
    return None


class TransformersPeer:
    """transformers' own generate, eager and in fp32, optionally with its prompt lookup."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        self.name, self.model = name, model
        self.lookup = name.endswith("lookup")
        self.memory_bytes = sum(p.numel() * p.itemsize for p in model.parameters())

    def run(
        self, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]
    ) -> Run:
        marks: list[tuple[float, int]] = []

        def watch(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that never stops: called once a forward."""
            marks.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        options = {"do_sample": sampling.kind != "greedy", "top_k": 0, "top_p": 1.0}
        if options["do_sample"]:
            options["temperature"] = sampling.temperature
            torch.manual_seed(sampling.seed)
        else:
            options |= {"top_k": None, "top_p": None, "temperature": None}
        if self.lookup:
            options["prompt_lookup_num_tokens"] = 10
        prompt = torch.tensor([ids])
        started = time.perf_counter()
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
        tokens = found[0, len(ids) :].tolist()[:budget]
        first, length = marks[0]
        decoded = max(len(ids) + len(tokens) - length, 0)
        return Run(tokens, first - started, marks[-1][0] - first, decoded, len(marks) - 1)


def load_transformers(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python, on a GGUF file of the same model."""

    def __init__(self, name: str, path: Path, context: int, threads: int) -> None:
        from llama_cpp import Llama

        self.name = name
        self.llama = Llama(
            str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1,
            verbose=False,
        )
        self.memory_bytes = path.stat().st_size

    def run(
        self, ids: list[int], sampling: SamplingConfig, budget: int, stop_ids: frozenset[int]
    ) -> Run:
        greedy = sampling.kind == "greedy"
        self.llama.reset()
        self.llama.set_seed(sampling.seed % 2**31)
        tokens: list[int] = []
        started = first = time.perf_counter()
        stream = self.llama.generate(
            ids,
            temp=0.0 if greedy else sampling.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        for token in stream:
            if not tokens:
                first = time.perf_counter()
            tokens.append(int(token))
            if len(tokens) == budget or token in stop_ids:
                break
        ended = time.perf_counter()
        stream.close()
        return Run(tokens, first - started, ended - first, len(tokens) - 1, len(tokens) - 1)


def open_peer(
    name: str, checkpoint: Path, gguf: Path | None, context: int, threads: int, shared: dict
) -> object:
    """The peer on the model files beside a checkpoint. ValueError says what is not there.

    shared: a model that an earlier call has loaded, for the peers that differ in nothing else.
    """
    directory = checkpoint.parent
    if name == "llama.cpp":
        found = [gguf] if gguf else sorted(directory.glob("*.gguf"))
        if not found or not found[0].is_file():
            raise ValueError(
                f"llama.cpp needs a GGUF file: give --gguf FILE or put one beside {checkpoint}"
            )
        return LlamaCppPeer(name, found[0], context, threads)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{name} needs the model's own config.json and weights beside {checkpoint}"
        )
    if "transformers" not in shared:
        shared["transformers"] = load_transformers(directory)
    return TransformersPeer(name, shared["transformers"])


def open_peers(
    wanted: list[str], open_one: Callable[[str], object], say: Callable[[str], None], strict: bool
) -> list[object]:
    """Every peer that can run; those that cannot are named, or refused where they were asked for by
    name.
    """
    peers = []
    for name in wanted:
        reason = missing(name)
        if reason is None:
            try:
                peers.append(open_one(name))
                continue
            except (ValueError, OSError) as error:
                reason = " ".join(str(error).split())
        if strict:
            raise ValueError(reason)
        say(f"without {name}: {reason}")
    return peers
