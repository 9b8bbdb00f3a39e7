"""What a generation did, measured: the record behind --json and the line for people.

Decode speed counts decoding alone: no loading, no compiling, no prefill. Bandwidth counts the bytes
that a round has to read, weights and cached rows, over its time."""

import json
import platform
import resource
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from talon.cli import note
from talon.decoder import Decoder, Generation
from talon.drafters.source import module_bytes
from talon.memory import gigabytes
from talon.text import Engine, TextGeneration


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU what torch allocated at most, on a CPU the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def bytes_per_round(decoder: Decoder, committed: float) -> float:
    """Weights and cached rows that one round reads: the target's once, the head's once a level."""
    model = decoder.model
    weights = sum(module_bytes(module) for module in (model.layers, model.output))
    total = weights + committed * decoder.cache.data[:, :, :, 0].nbytes
    return total + decoder.drafter.bytes_read(committed)


def moved_bytes(run: Generation) -> float:
    """What all rounds of a generation read together."""
    middle = len(run.ids) + len(run.tokens) / 2
    return bytes_per_round(run.decoder, middle) * run.stats.rounds


def sample_record(run: Generation, text: str | None) -> dict:
    """What --json says of a sample, in seconds, bytes and tokens. text: None without tokenizer."""
    decoder, stats = run.decoder, run.stats
    speed = stats.emitted / stats.decode_s if stats.decode_s else 0.0
    return {
        "seed": run.sampling.seed,
        "prompt_tokens": len(run.ids),
        "tokens": run.tokens,
        "text": text,
        "stop_reason": run.stop_reason,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "tokens_per_s": speed,
        "rounds": stats.rounds,
        "acceptance_length": stats.acceptance_length,
        "accepted_by_depth": stats.accepted_by_depth,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "bandwidth_bytes_per_s": moved_bytes(run) / stats.decode_s if stats.decode_s else 0.0,
        "peak_memory_bytes": peak_memory(decoder.device),
    }


def describe(record: dict, drafting: bool) -> str:
    """One sample's measurements as a line for people."""
    line = (
        f"{len(record['tokens'])} tokens ({record['stop_reason']}), "
        f"first token after {record['prefill_s']:.2f} s, then {record['tokens_per_s']:.1f} "
        f"tokens/s, {record['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, peak memory "
        f"{gigabytes(record['peak_memory_bytes'])}"
    )
    if not drafting or not record["rounds"]:
        return line
    rest = record["decode_s"] - record["draft_s"] - record["verify_s"]
    by_depth = " ".join(f"{count / record['rounds']:.2f}" for count in record["accepted_by_depth"])
    return (
        f"{line}\nacceptance length {record['acceptance_length']:.2f} over {record['rounds']} "
        f"rounds (share accepted by depth: {by_depth or 'none'}); draft {record['draft_s']:.2f} s, "
        f"verify {record['verify_s']:.2f} s, rest {rest:.2f} s"
    )


def project_commit() -> str | None:
    """The commit of this checkout, with "-dirty" where files differ from it; None elsewhere."""
    try:
        command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
        where = Path(__file__).parent
        result = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def write_json(path: str, value: dict) -> None:
    from talon.writing import atomic_file  # seldom needed

    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    with atomic_file(Path(path)) as file:
        # A file name from the shell may hold bytes that are no text: JSON has an escape for them.
        file.write(text.encode(errors="backslashreplace"))


def markdown_table(lines: list[list[str]]) -> str:
    """A table for people whose first line is the heading."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def short_commit(report: dict) -> str:
    number, dirty, _ = (report["commit"] or "unknown").partition("-dirty")
    return number[:10] + dirty


@dataclass
class Results:
    """What --json writes, as far as it has come."""

    samples: list[dict] = field(default_factory=list)
    checks: list[dict] = field(default_factory=list)

    def add(self, text: TextGeneration) -> None:
        """Measure a finished text, and tell people."""
        self.samples.append(sample_record(text.generation, text.text if text.stream else None))
        note(describe(self.samples[-1], text.engine.decoder.tree.nodes > 1))

    def to_json(self, engine: Engine, argv: list[str], recompiles: int) -> dict:
        top = {"argv": argv, **engine.card, "recompiles": recompiles, "commit": project_commit()}
        top["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
        if self.checks:
            wrong = (check for check in self.checks if not check["identical"])
            top["check"] = next(wrong, self.checks[0])
        return {**top, "samples": self.samples}
