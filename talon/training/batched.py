"""."""

import torch
from torch import Tensor
from tqdm import tqdm

from model import KVCache, Transformer, TransformerBlock, rope_table, rotate
from talon.sampling import Filtered
from talon.training.evaluation import Text

SAMPLING_POOL = 64  # sampled tokens come from this many best ones


def batched_block(
    layer: TransformerBlock, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, kv: Tensor
) -> Tensor:
    """TransformerBlock.forward for one row of each of B sequences. x: [B, C]; mask: [B, R]; kv: [2,
    B * G, R, D]."""
    attention, batch, width = layer.attention, *mask.shape
    heads, groups, size = attention.n_head, attention.n_kv_head, attention.head_dim
    qkv = attention.wqkv(layer.attention_norm(x)).view(batch, heads + 2 * groups, size)
    q, k, v = qkv.split((heads, groups, groups), dim=1)
    row = torch.arange(batch, device=x.device)
    # Keys lie transposed, and products read the whole cache: anything strided would be copied
    # first.
    keys, values = kv[0].view(batch * groups, size, -1), kv[1]
    keys.view(batch, groups, size, -1)[row, :, :, slots] = rotate(k, rope).to(keys.dtype)
    values.view(batch, groups, -1, size)[row, :, slots] = v
    q = rotate(q, rope * size**-0.5).view(batch * groups, -1, size)
    scores = (
        torch.bmm(q, keys).view(batch, heads, width).masked_fill_(~mask[:, None], float("-inf"))
    )
    weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
    y = torch.bmm(weights.view(batch * groups, -1, width), values)
    x = x + attention.wo(y.view(batch, -1))
    return x + layer.feed_forward(layer.ffn_norm(x))


class BatchedDecoder:
    """B conversations in one batch, a row each; a finished one gives its row to the next at
    once."""

    def __init__(self, model: Transformer, batch: int, rows: int, seed: int) -> None:
        self.model, self.batch, self.rows, c = model, batch, rows, model.config
        weight = model.norm.weight
        self.device = weight.device
        self.cache = KVCache(c.n_layer, batch * c.n_kv_head, rows, c.head_dim, weight.dtype)
        self.cache.to(self.device)
        self.table = rope_table(rows, c.head_dim, c.rope_theta, c.rope_scaling).to(self.device)
        self.seed = torch.tensor([seed], device=self.device)
        self.top_k = torch.tensor([SAMPLING_POOL], device=self.device)
        self.slots = torch.arange(rows, device=self.device)
        self.tokens = torch.arange(c.vocab_size, device=self.device)

    @torch.inference_mode()
    def step(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Run one token of every conversation; logits [B, V]."""
        at = torch.tensor(positions, device=self.device)
        mask = self.slots <= at[:, None]
        x = self.model.tok_embeddings(torch.tensor(tokens, device=self.device))
        for index, layer in enumerate(self.model.layers):
            x = batched_block(layer, x, self.table[:, at], at, mask, self.cache.layer(index))
        return self.model.output(self.model.norm(x))

    @torch.inference_mode()
    def choose(self, logits: Tensor, wanted: list[tuple[int, float, float, int]]) -> list[int]:
        """One token for each (row, temperature, top_p, noise counter); temperature 0 is greedy."""
        chosen = logits.max(dim=1).indices.tolist()
        result = {row: chosen[row] for row, *_ in wanted}
        sampled = [item for item in wanted if item[1] > 0]
        if sampled:
            rows, temperatures, top_ps, counters = zip(*sampled, strict=True)
            temperature = torch.tensor(temperatures, device=self.device)[:, None]
            top_p = torch.tensor(top_ps, device=self.device)[:, None]
            pick = Filtered(temperature, self.seed, self.top_k, top_p)
            positions = torch.tensor(counters, device=self.device)
            values, columns = pick.values(logits[list(rows)], positions, self.tokens, SAMPLING_POOL)
            best = columns.gather(1, values.argmax(1, keepdim=True))[:, 0].tolist()
            result |= dict(zip(rows, best, strict=True))
        return [result[row] for row, *_ in wanted]


def answer_greedily(model: Transformer, prompts: list[list[int]], new_tokens: int) -> list[Text]:
    """The target's greedy answers, all questions in one batch; an answer ends with the model's own
    end."""
    rows = max(map(len, prompts)) + new_tokens
    decoder = BatchedDecoder(model, len(prompts), rows, seed=0)
    texts = [Text(prompt, []) for prompt in prompts]
    stop_ids = set(model.config.eos_ids)
    open_rows = set(range(len(texts)))
    bar = tqdm(total=rows - 1, unit="step", desc="answers")
    for position in range(rows - 1):
        known = [text.ids for text in texts]
        at = [min(position, len(ids) - 1) for ids in known]
        logits = decoder.step([ids[p] for ids, p in zip(known, at, strict=True)], at)
        chosen = logits.argmax(1).tolist()
        for row in sorted(open_rows):
            text = texts[row]
            if position >= len(text.prompt) - 1:
                text.answer.append(chosen[row])
                if chosen[row] in stop_ids or len(text.answer) == new_tokens:
                    open_rows.discard(row)
        bar.update()
        if not open_rows:
            break
    bar.close()
    return texts
