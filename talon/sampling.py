"""The choice of a token, for the target's side and for the head's.

Sampling is exact and a function of (seed, position, token) alone: a token is the argmax of its
filtered logits over the temperature plus Gumbel noise (the Gumbel-max trick), and the noise comes
from a counter-based hash. The same position therefore always meets the same noise, whoever asks:
plain decoding, a tree of 60 nodes, or the head that guesses. This is drafter-invariant speculative
decoding (Daliri, Musco, Suresh, arXiv 2408.07978).

Everything here runs inside compiled regions: tensors in, tensors out, fp32, no data-dependent
shapes."""

from dataclasses import dataclass

import torch
from torch import Tensor

HOTTEST = 1e6  # hotter than this every token is equally likely
GREEDY_BELOW = 1e-5  # below this, logits over temperature leave fp32's resolution: greedy
NO_TOP_K = 2**31
NO_TOKEN = -1
WORD = 0xFFFFFFFF
GUESS_POOL = 256  # the head filters only its best tokens: it guesses, the target decides


@dataclass(frozen=True)
class SamplingConfig:
    """What the user asks for. temperature 0 is greedy; top_k 0 and top_p 1 filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("top_k", self.top_k), ("seed", self.seed)):
            if not isinstance(value, int):
                raise ValueError(f"{name} {value!r} is not allowed: give a whole number")
        if not 0 <= self.temperature <= HOTTEST:  # NaN fails too
            raise ValueError(
                f"temperature {self.temperature} is not allowed: give a number >= 0 and <= "
                f"{HOTTEST:g} (0 is greedy)"
            )
        if not -1 <= self.top_k < 2**63:
            raise ValueError(
                f"top_k {self.top_k} is not allowed: give a count up to 2**63 - 1 (0 is no limit)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p {self.top_p} is not allowed: give 0 < top_p <= 1 (1 is no limit)"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} is not allowed: give 0 to 2**63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def pick(self) -> str:
        """The name of the Pick that serves this."""
        if self.greedy:
            return Greedy.name
        return Filtered.name if self.top_k > 0 or self.top_p < 1 else Sampled.name


GREEDY = SamplingConfig()


def mix(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64 (a two-round multiply-xorshift finalizer).

    Both multipliers are below 2**31, so no product leaves the range of int64 on any device.
    """
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & WORD
    x = ((x ^ (x >> 12)) * 0x297A2D39) & WORD
    return x ^ (x >> 15)


def gumbel(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise [N, M] in fp32 for positions int64 [N] and tokens int64 [M] or [N, M].

    g = -log(E), E = -log1p(-u): the small E win, and u from 32 bits resolves them fully."""
    low = mix((seed & WORD) ^ 0x5BD1E995)
    high = mix((seed >> 32) ^ 0x1B873593)
    first = mix((positions + low) & WORD)[:, None]  # [N, 1]
    second = mix(first ^ high)
    words = mix(mix(tokens ^ first) ^ second)
    u = ((words.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-u))


class Pick:
    """How a token is chosen: by the highest of its `values`."""

    name: str

    def values(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, pool: int
    ) -> tuple[Tensor, Tensor]:
        """What the choice is the argmax of, fp32 [N, M or pool], and which column of `logits` each
        value belongs to, int64 of the same shape.

        logits: [N, M]; positions: int64 [N], absolute position of the token being chosen; tokens:
        int64 [M], the token id of each column; pool: how many of the best columns a filter looks
        at, exact when pool = M."""
        raise NotImplementedError

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's choice after each of N tokens, int64 [N]. Ties go to the lowest id; where a
        logit is NaN there is no choice, which is NO_TOKEN."""
        tokens = torch.arange(logits.shape[1], device=logits.device)
        values, columns = self.values(logits, positions, tokens, pool=logits.shape[1])
        best = values.argmax(1, keepdim=True)  # NaN counts as the highest
        chosen = torch.where(values.gather(1, best).isnan(), NO_TOKEN, columns.gather(1, best))
        return chosen[:, 0]

    def guess(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, top_k: int,
        above: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The head's `top_k` likeliest choices of the target after each of N tokens, best first.

        The head meets the same noise as the target will, so it ranks what the target is about to
        choose, not what is likely on average. Returns log-probabilities fp32 [N, top_k], added to
        those `above`, fp32 [N], where there are any, and ids int64 [N, top_k]. NaN ranks last."""
        pool = max(min(GUESS_POOL, logits.shape[1]), top_k)
        values, columns = self.values(logits, positions, tokens, pool)
        scores, index = ranked(values, top_k)
        scores = scores if above is None else above[:, None] + scores
        return scores, tokens[columns.gather(1, index)]


def ranked(values: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities fp32 [N, top_k] of the best of values fp32 [N, M], and their index."""
    values = torch.where(values.isnan(), float("-inf"), values)
    best, index = values.topk(top_k, dim=1)
    scores = best - values.logsumexp(1, keepdim=True)
    return torch.where(scores.isnan(), float("-inf"), scores).clamp(max=0), index


class Greedy(Pick):
    """The likeliest token, of the logits as they are."""

    name = "greedy"

    def values(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, pool: int
    ) -> tuple[Tensor, Tensor]:
        columns = torch.arange(logits.shape[1], device=logits.device)
        return logits.float(), columns.expand(logits.shape)


class Sampled(Pick):
    """A sample of the softmax over logits / temperature. Tensors of one element, static: to fill
    them with other values compiles nothing and survives graph capture."""

    name = "sample"

    def __init__(self, temperature: Tensor, seed: Tensor) -> None:
        self.temperature, self.seed = temperature, seed

    def values(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, pool: int
    ) -> tuple[Tensor, Tensor]:
        columns = torch.arange(logits.shape[1], device=logits.device)
        noise = gumbel(self.seed, positions, tokens)
        return logits.float() / self.temperature + noise, columns.expand(logits.shape)


class Filtered(Pick):
    """The same after filters, in this order: temperature, top_k (exactly k are kept), top_p (the
    smallest set that reaches p, at least one)."""

    name = "filter"

    def __init__(self, temperature: Tensor, seed: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        self.temperature, self.seed, self.top_k, self.top_p = temperature, seed, top_k, top_p

    def values(
        self, logits: Tensor, positions: Tensor, tokens: Tensor, pool: int
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / self.temperature
        if pool < scaled.shape[1]:
            scaled, columns = scaled.topk(pool, dim=1)
        else:  # a stable sort: of equal logits the lower id is kept first
            scaled, columns = scaled.sort(dim=1, descending=True, stable=True)
        return self.among(scaled, positions, tokens[columns]), columns

    def among(self, scaled: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """The same for columns in falling order: logits over the temperature fp32 [N, M], and the
        tokens int64 [N, M] that they belong to."""
        rank = torch.arange(scaled.shape[1], device=scaled.device)
        scaled = scaled.masked_fill(rank >= self.top_k, float("-inf"))
        probs = scaled.softmax(1)
        before = probs.cumsum(1) - probs  # the mass of everything better
        scaled = scaled.masked_fill((before >= self.top_p) & (rank > 0), float("-inf"))
        return scaled + gumbel(self.seed, positions, tokens)


class Picks:
    """One Pick of each kind, over the same static tensors."""

    def __init__(self, device: torch.device) -> None:
        self.temperature = torch.ones(1, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(1, device=device)
        by_softmax = self.temperature, self.seed
        kinds = Greedy(), Sampled(*by_softmax), Filtered(*by_softmax, self.top_k, self.top_p)
        self.by_name = {pick.name: pick for pick in kinds}

    def set(self, config: SamplingConfig) -> Pick:
        """The pick that serves `config`, its tensors filled."""
        self.temperature.fill_(max(config.temperature, GREEDY_BELOW))
        self.seed.fill_(config.seed)
        self.top_k.fill_(config.top_k if config.top_k > 0 else NO_TOP_K)
        self.top_p.fill_(config.top_p)
        return self.by_name[config.pick]
