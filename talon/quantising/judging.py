"""What a quantised target lost: perplexity, KL divergence and greedy tokens against the original.

Leaves out: speed (benchmark.py), and answers as people read them."""

from typing import NamedTuple

import torch
from torch import Tensor

from talon.checkpoint import Checkpoint
from talon.quantising.blocks import Blocks

CPU = torch.device("cpu")


class Judgement(NamedTuple):
    before: float  # perplexity of the original
    after: float
    divergence: float  # KL(original | quantised) in nats, mean over all positions
    same: float  # share of positions with the same greedy token


@torch.inference_mode()
def judge(original: Checkpoint, checkpoint: Checkpoint, windows: list[Tensor]) -> Judgement:
    """Both on the same windows of token ids, on the CPU in fp32."""
    states, outputs = [], []
    for each in (original, checkpoint):
        blocks = Blocks(each, windows, CPU)
        for _ in blocks.run("judging"):
            pass
        states.append(blocks.states)
        outputs.append(blocks.output())
    sums, followed = torch.zeros(4, dtype=torch.float64), 0
    for window, *pair in zip(windows, *states, strict=True):
        following = torch.cat((window[1:], window[:1]))  # nothing follows the last one
        for start in range(0, len(window), 64):
            some = slice(start, start + 64)
            logits = [output(x[some]) for output, x in zip(outputs, pair, strict=True)]
            logs = [each.log_softmax(-1) for each in logits]
            known = torch.arange(len(window))[some] < len(window) - 1
            chosen = [each.gather(1, following[some, None])[known].sum() for each in logs]
            divergence = (logs[0].exp() * (logs[0] - logs[1])).sum()
            same = (logits[0].argmax(-1) == logits[1].argmax(-1)).sum()
            sums += torch.stack((-chosen[0], -chosen[1], divergence, same)).double()
        followed += len(window) - 1
    before, after = (sums[:2] / followed).exp().tolist()
    return Judgement(before, after, *(sums[2:] / sum(map(len, windows))).tolist())
