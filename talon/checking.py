"""The slow path, and who agrees with it: the obvious forward that tests hold the fast one against,
and `--check`, which holds drafted decoding against plain decoding."""

import math
from collections.abc import Iterator
from os.path import commonprefix

import torch
from torch import Tensor

from model import At, KVCache, Transformer, rope_table
from talon.decoder import CHUNKS, Decoder, Generation
from talon.sampling import SamplingConfig
from talon.text import Engine, TextGeneration


def forwards(
    model: Transformer,
    ids: list[int],
    cache: KVCache,
    table: Tensor,
    feature_layers: tuple[int, ...] = (),
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The model's forward over a whole text; on a GPU several, of as many rows as its operators
    take. table: fp32 [2, R, D], of RoPE."""
    tokens = torch.tensor(ids, device=table.device)
    slots = torch.arange(len(ids), device=table.device)
    for own in slots.split(CHUNKS["cuda"][-1] if tokens.is_cuda else len(ids)):
        place = model.place(table, own, own, At(own[:1], slots))
        yield model(tokens[own], place, cache, feature_layers)


@torch.inference_mode()
def full_logits(model: Transformer, ids: list[int]) -> Tensor:
    """fp32 logits [T, V] of every position: the slow, obvious forward, with nothing cached."""
    c, weight = model.config, model.norm.weight
    cache = KVCache(c.n_layer, c.n_kv_head, len(ids), c.head_dim, weight.dtype).to(weight.device)
    table = rope_table(len(ids), c.head_dim, c.rope_theta, c.rope_scaling).to(weight.device)
    passes = forwards(model, ids, cache, table)
    return torch.cat([model.output(hidden).float() for hidden, _ in passes])


def slow_greedy(model: Transformer, ids: list[int], max_new_tokens: int) -> list[int]:
    """Greedy decoding by the slow path."""
    text = list(ids)
    for _ in range(max_new_tokens):
        text.append(int(full_logits(model, text)[-1].argmax()))
    return text[len(ids) :]


def check_sample(plain: Decoder, text: TextGeneration) -> dict:
    """Decode the same prompt plainly, to the same end, and compare the ids."""
    run, engine = text.generation, text.engine
    alone = Engine(plain, engine.tokenizer, tuple(engine.eos_ids), engine.card)
    again = Generation(plain, run.ids, run.sampling, run.budget, run.stop_ids)
    for _ in TextGeneration(alone, again, text.stop):
        pass
    return compare_ids(plain, run.ids, run.tokens, again.tokens, run.sampling)


def compare_ids(
    plain: Decoder, ids: list[int], tokens: list[int], wanted: list[int], sampling: SamplingConfig
) -> dict:
    """Whether two continuations of `ids` are equal, else where they first differ and the gap there:
    how much higher the wanted token stands, in the logits (or noisy logits) that plain decoding
    chose by; None where one of them only ends earlier or a filter excludes the other token."""
    if tokens == wanted:
        return {"identical": True, "first_difference": None, "gap": None}
    first, gap = len(commonprefix([tokens, wanted])), None
    if first < min(len(tokens), len(wanted)):
        gap = choice_gap(plain, ids + wanted[:first], wanted[first], tokens[first], sampling)
    return {"identical": False, "first_difference": first, "gap": gap}


def choice_gap(
    plain: Decoder, ids: list[int], chosen: int, other: int, sampling: SamplingConfig
) -> float | None:
    """How much higher `chosen` stands than `other` after `ids`; None: infinitely."""
    logits = full_logits(plain.model, ids)[-1:]
    tokens = torch.arange(logits.shape[1], device=logits.device)
    position = torch.tensor([len(ids)], device=logits.device)
    values, columns = plain.picks.set(sampling).values(logits, position, tokens, logits.shape[1])
    values = torch.empty_like(values).scatter_(1, columns, values)
    gap = float(values[0, chosen] - values[0, other])
    return gap if math.isfinite(gap) else None
