"""The KV cache of one batch: every row has a length of its own, and padding goes to a scratch column."""

import torch
from torch import Tensor
from torch.nn import functional

from drafter.model import AttendByLayer, Decoder


class KVCache:
    """Keys and values of a batch of rows, [layers, rows, kv_heads, columns, head_dim].

    Rows are never padded on the left: a row's token i stands in column i. The last column is scratch: what
    pads a ragged batch is written there and no query sees it.
    """

    def __init__(self, keys_lbkcd: Tensor, values_lbkcd: Tensor, lengths: list[int]) -> None:
        self.keys_lbkcd = keys_lbkcd
        self.values_lbkcd = values_lbkcd
        self.lengths = lengths

    @classmethod
    def empty(cls, decoder: Decoder, rows: int, columns: int) -> "KVCache":
        """Return a cache for `rows` rows of at most `columns` tokens, of the decoder's type and device."""
        config, weight = decoder.config, decoder.head_weight
        shape = (config.layers, rows, config.kv_heads, columns + 1, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        return cls(keys, values, [0] * rows)

    def extend(self, decoder: Decoder, rows: slice, tokens: list[list[int]]) -> Tensor:
        """Run new tokens of some rows through the decoder and keep their keys and values.

        Args:
            decoder: the model.
            rows: which rows, contiguous.
            tokens: for each of those rows its new tokens, at least one.

        Returns:
            The hidden state of each row's last new token, [rows, hidden].
        """
        first, count = rows.start, len(tokens)
        starts, sizes = self.lengths[rows], [len(row) for row in tokens]
        width, device = max(sizes), self.keys_lbkcd.device
        padded = [row + [0] * (width - len(row)) for row in tokens]
        tokens_bt = torch.tensor(padded, device=device)
        steps_t = torch.arange(width, device=device)
        positions_bt = torch.tensor(starts, device=device)[:, None] + steps_t
        real_bt = steps_t < torch.tensor(sizes, device=device)[:, None]
        scratch = self.keys_lbkcd.shape[3] - 1
        columns_bt = torch.where(real_bt, positions_bt, scratch)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        attend = self._attend(slice(first, first + count), positions_bt, columns_bt, max(ends))
        hidden_btd = decoder(tokens_bt, positions_bt, attend)
        self.lengths[rows] = ends
        last_b = torch.tensor(sizes, device=device) - 1
        return hidden_btd[torch.arange(count, device=device), last_b]  # type: ignore[no-any-return]

    def _attend(self, rows: slice, positions_bt: Tensor, columns_bt: Tensor, context: int) -> AttendByLayer:
        """Return the attention of these rows: it writes the new columns, then reads those in use."""
        count, width = positions_bt.shape
        index_b1 = torch.arange(rows.start, rows.stop, device=positions_bt.device)[:, None]
        visible_btc = torch.arange(context, device=positions_bt.device) <= positions_bt[:, :, None]

        def attend(layer: int, queries_bhtd: Tensor, keys_bktd: Tensor, values_bktd: Tensor) -> Tensor:
            keys_bkcd, values_bkcd = self.keys_lbkcd[layer], self.values_lbkcd[layer]
            keys_bkcd[index_b1, :, columns_bt] = keys_bktd.transpose(1, 2)
            values_bkcd[index_b1, :, columns_bt] = values_bktd.transpose(1, 2)
            # The heads of a group share their keys: fold them into the token axis instead of copying keys.
            groups = queries_bhtd.shape[1] // keys_bktd.shape[1]
            folded = queries_bhtd.reshape(count, -1, groups * width, queries_bhtd.shape[-1])
            out = functional.scaled_dot_product_attention(
                folded,
                keys_bkcd[rows, :, :context],
                values_bkcd[rows, :, :context],
                attn_mask=visible_btc.repeat(1, groups, 1)[:, None],
            )
            return out.reshape(queries_bhtd.shape)

        return attend

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these, in this order."""
        index = torch.tensor(rows, device=self.keys_lbkcd.device)
        self.keys_lbkcd = self.keys_lbkcd.index_select(1, index)
        self.values_lbkcd = self.values_lbkcd.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]


def prefill_groups(sizes: list[int]) -> list[slice]:
    """Split rows, sorted by their number of new tokens, into contiguous groups of like size.

    A group grows while its padding stays under half of it, so that one long prompt never makes a whole
    batch of short ones wait for its width.
    """
    groups, first, total = [], 0, 0
    for row, size in enumerate(sizes):
        if row > first and (row - first + 1) * size > 2 * (total + size):
            groups.append(slice(first, row))
            first, total = row, 0
        total += size
    groups.append(slice(first, len(sizes)))
    return groups
