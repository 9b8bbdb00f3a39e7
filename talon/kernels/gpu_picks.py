"""Picks on a GPU: the choices and guesses of talon/sampling.py, without sorting a vocabulary.

    pick = GpuPick(pick, device)        of a Greedy, Sampled or Filtered, over the same tensors

Choosing is one launch (gpu_choice.py). Before it `limits` finds what top_k and top_p keep, in plain
torch for a compiled region: the key of the last token that is kept, two bits at a time from sums
over the row, eight passes for bf16. A GPU sorts 128 thousand columns ten times slower than it adds
them up. Leaves out fp32 logits that only the division by the temperature makes equal.
"""

import torch
from torch import Tensor

from talon.kernels import gpu_choice  # noqa: F401
from talon.sampling import Pick, ranked

POOL = 64  # a head's guesses are filtered among so many
MOST_ROWS = 1024

BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}  # of a key that can differ


def keys_of(logits: Tensor) -> Tensor:
    """int32 in the order of the logits."""
    bits = (logits.float() + 0.0).view(torch.int32)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def weigh(keys: Tensor, weights: Tensor, lowest: Tensor) -> Tensor:
    """fp32 [T, n]: the weights of all tokens whose keys are at least `lowest` int32 [T, n]."""
    columns = lowest.split(1, 1)
    return torch.stack([torch.where(keys >= x, weights, 0).sum(1) for x in columns], 1)


def search(keys: Tensor, weights: Tensor, wanted: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The last token that a stable sort needs to reach the weight `wanted` fp32 [T, 1].

    keys: int32 [T, V] of which the first `bits` differ; weights: fp32, alike for equal keys.
    Returns its key int32 [T, 1], and how many of those with this key are needed, fp32 [T, 1]."""
    low = torch.full_like(wanted, -(2**31), dtype=torch.int32)
    for shift in range(30, 31 - bits, -2):
        steps = (1 << shift) * torch.arange(1, 4, dtype=torch.int32, device=keys.device)
        enough = weigh(keys, weights, low + steps) >= wanted
        low = low + (1 << shift) * enough.sum(1, keepdim=True, dtype=torch.int32)
    key = torch.where(keys >= low, keys, 2**31 - 1).amin(1, keepdim=True)
    above, within = weigh(keys, weights, torch.cat((key + 1, key), 1)).split(1, 1)
    count = (keys == key).sum(1, keepdim=True)
    needed = ((wanted - above) / ((within - above) / count)).ceil()
    return key, torch.minimum(needed.clamp(min=1), count)


def limits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """int32 [T, 2]: the lowest key that is kept, and the last id of those that share it; just what
    a stable sort in falling order keeps, of equal logits the lower ids.

    logits: [T, V]; temperature, top_p: fp32 [1], 1 for no limit; top_k: int64 [1]. top_p counts
    what top_k left."""
    keys, bits = keys_of(logits), BITS[logits.dtype]
    scaled = logits.float() / temperature
    masses = (scaled - scaled.amax(1, keepdim=True)).exp()
    wanted = top_k.clamp(max=logits.shape[1]).float().expand(len(logits), 1)
    key, count = search(keys, torch.ones_like(temperature), wanted, bits)
    own = torch.where(keys == key, masses, 0).amax(1, keepdim=True)
    whole = weigh(keys, masses, key + 1) + count * own
    wanted = torch.where(top_p < 1, top_p * whole, float("inf"))
    key2, count2 = search(keys, masses, wanted, bits)
    closer = (key2 > key) | ((key2 == key) & (count2 < count))
    key, count = torch.where(closer, key2, key), torch.where(closer, count2, count)
    equal = keys == key
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    last = torch.where(equal & (equal.cumsum(1) <= count), ids, -1).amax(1, keepdim=True)
    return torch.cat((key, last), 1)


class GpuPick:
    """A Pick that chooses and guesses by the operator, for at most MOST_ROWS rows."""

    def __init__(self, pick: Pick, device: torch.device) -> None:
        self.name, self.pick, self.values = pick.name, pick, pick.values
        self.arrived = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)

    def best(self, logits: Tensor, positions: Tensor | None, *more: object) -> tuple:
        """`talon::best`. positions: None for no noise; more: what is kept, ids, above, top."""
        noise = None, None, None
        if self.name != "greedy" and positions is not None:
            noise = positions, self.pick.temperature, self.pick.seed
        return torch.ops.talon.best(logits, self.arrived, *noise, *more)

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """As `sampling.Pick.choose`."""
        pick, kept = self.pick, None
        if self.name == "filter":
            kept = limits(logits, pick.temperature, pick.top_k, pick.top_p)
        return self.best(logits, positions, kept, None, None, 1)[0][:, 0]

    def guess(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, top_k: int,
        above: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `sampling.Pick.guess`; a filter looks at the best POOL columns, or at top_k."""
        if self.name != "filter":
            return self.best(logits, positions, None, tokens, above, top_k)[::-1]
        pick, pool = self.pick, max(min(POOL, logits.shape[1]), top_k)
        tokens, scores = self.best(logits, None, None, tokens, None, pool)
        scores, index = ranked(pick.among(scores / pick.temperature, positions, tokens), top_k)
        return scores if above is None else above[:, None] + scores, tokens.gather(1, index)
