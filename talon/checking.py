"""."""

import math

import torch
from torch import Tensor

from model import KVCache, Transformer, causal_mask, rope_table
from talon.decoder import Decoder
from talon.sampling import SamplingConfig, perturb
from talon.text import Engine, TextGeneration


@torch.inference_mode()
def full_logits(model: Transformer, ids: list[int]) -> Tensor:
    """fp32 logits [T, V] of every position: the slow, obvious forward, eager and without a kept
    cache.
    """
    c, device = model.config, model.norm.weight.device
    rows = torch.arange(len(ids), device=device)
    cache = KVCache(c.n_layer, c.n_kv_head, len(ids), c.head_dim, model.norm.weight.dtype).to(
        device
    )
    table = rope_table(len(ids), c.head_dim, c.rope_theta, c.rope_scaling).to(device)
    mask = causal_mask(rows[:1], len(ids), rows)
    x, _ = model(model.tok_embeddings(torch.tensor(ids, device=device)), table, rows, mask, cache)
    return model.output(model.norm(x)).float()


def slow_greedy(model: Transformer, ids: list[int], max_new_tokens: int) -> list[int]:
    """Greedy decoding by the slow path, for tests to hold the fast one against."""
    text = list(ids)
    for _ in range(max_new_tokens):
        text.append(int(full_logits(model, text)[-1].argmax()))
    return text[len(ids) :]


# ---------------------------------------------------------------- the check against plain decoding


def check_sample(plain: Decoder, text: TextGeneration) -> dict:
    """Decode the same prompt plainly, to the same end, and compare the ids."""
    run, engine = text.generation, text.engine
    alone = Engine(plain, engine.tokenizer, tuple(engine.eos_ids), engine.card)
    again = TextGeneration(alone, run.ids, run.sampling, run.budget, text.stop_ids, text.stop)
    for _ in again:
        pass
    return compare_ids(plain, run.ids, run.tokens, again.tokens, run.sampling)


def compare_ids(
    plain: Decoder, ids: list[int], tokens: list[int], wanted: list[int], sampling: SamplingConfig
) -> dict:
    """Whether two continuations of `ids` are equal, else where they first differ and the gap there:
    how much higher the wanted token's value is, in what plain decoding chose by (`choice_gap`).
    It is None where one continuation only ends earlier."""
    shorter = min(len(tokens), len(wanted))
    first = next((i for i in range(shorter) if tokens[i] != wanted[i]), shorter)
    if first == len(tokens) == len(wanted):
        return {"identical": True, "first_difference": None, "gap": None}
    gap = None
    if first < shorter:
        gap = choice_gap(plain, ids + wanted[:first], wanted[first], tokens[first], sampling)
    return {"identical": False, "first_difference": first, "gap": gap}


def choice_gap(
    plain: Decoder, ids: list[int], chosen: int, other: int, sampling: SamplingConfig
) -> float | None:
    """How much higher `chosen` stands than `other` after `ids`, in the values that are chosen by;
    None: infinitely.
    """
    logits = full_logits(plain.model, ids)[-1:]
    tokens, position = torch.arange(logits.shape[1]), torch.tensor([len(ids)])
    if sampling.kind != "greedy":
        plain.sampling.set(sampling)
        values, columns = perturb(
            logits, position.to(logits.device), tokens.to(logits.device), plain.sampling,
            sampling.kind, logits.shape[1],
        )  # fmt: skip
        logits = torch.empty_like(values).scatter_(1, columns, values)
    gap = float(logits[0, chosen] - logits[0, other])
    return gap if math.isfinite(gap) else None
