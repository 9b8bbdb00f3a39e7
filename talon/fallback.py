"""."""

import torch
from torch import Tensor

PATIENCE = 4.0  # tokens, against plain decoding, that drafting may lose before it pauses

TRIAL = 1.5  # tokens that drafting may lose when it returns

FIRST_PAUSE, LONGEST_PAUSE = (
    48,
    768,
)  # plain rounds before it returns; doubled each time that this fails


class Pace:
    """Whether the next round drafts: a running balance of tokens won against plain decoding (Page's
    test).

    A drafted round takes `break_even` times as long as a plain one, so it must give that many
    tokens.
    """

    def __init__(self, break_even: float) -> None:
        self.break_even = break_even
        self.balance = 0.0  # never above 0: old wins do not pay for new losses
        self.pause, self.next_pause = 0, FIRST_PAUSE

    @property
    def plain(self) -> bool:
        return self.pause > 0

    def new_text(self) -> None:
        """Another text may suit the draft better: a long pause is cut."""
        self.pause = min(self.pause, FIRST_PAUSE)

    def count(self, tokens: int, plain: bool) -> None:
        """A round gave `tokens` tokens."""
        if plain:
            self.pause -= 1
            return
        if self.plain:  # a round that was under way when the pause began
            return
        self.balance = min(self.balance + tokens - self.break_even, 0.0)
        if self.balance == 0:
            self.next_pause = FIRST_PAUSE
        elif self.balance < -PATIENCE:
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)
            self.balance = TRIAL - PATIENCE


class Backlog:
    """Features and tokens of plain rounds, in static buffers, until the drafter learns them."""

    def __init__(
        self, levels: int, dim: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.features = [torch.zeros(rows, dim, dtype=dtype, device=device) for _ in range(levels)]
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, features: list[Tensor], token: Tensor) -> None:
        """One row: features [1, C] each and the token int64 [1] that follows it."""
        for kept, feature in zip(self.features, features, strict=True):
            kept.index_copy_(0, self.count, feature)
        self.tokens.index_copy_(0, self.count, token)
        self.count.add_(1)
