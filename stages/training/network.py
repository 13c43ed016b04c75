"""The drafter in training: weights in the compute type, their gradients, and the pass over packed rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafter.config import ModelConfig
from drafter.model import Decoder, Layer, rotary_tables
from stages.training.attention import packed_attention
from stages.training.batches import Batch
from stages.training.loss import Loss, Targets, drafter_loss

Weights = dict[str, Tensor]
CHUNK_LOGITS = 1 << 27


class Network:
    """A decoder whose weights a trainer sets before each pass.

    Args:
        config: its shape.
        dtype: compute type of matrices and activations; norms stay float32.
        device: where it runs.
        compiled: compile a layer once and run all layers through it.
        checkpointing: keep each layer's input only, and run the layer again on the way back.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str, compiled: bool = False,
                 checkpointing: bool = False) -> None:
        with torch.device("meta"):
            decoder = Decoder(config)
        empty = {
            name: torch.empty(value.shape, dtype=dtype if value.ndim == 2 else torch.float32, device=device)
            for name, value in decoder.named_parameters()
        }
        decoder.load_state_dict(empty, assign=True)
        self.decoder = decoder
        self.weights: Weights = dict(decoder.named_parameters())
        self.checkpointing = checkpointing
        self.layer: Callable[..., Tensor] = run_layer
        if compiled:
            self.layer = torch.compile(run_layer, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copy weights in, rounded to the compute type. Nothing moves, so what was compiled stays valid."""
        torch._foreach_copy_([self.weights[name] for name in weights], list(weights.values()))

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states of a batch, [tokens, hidden]."""
        layer = self.layer if torch.is_grad_enabled() else run_layer
        if self.checkpointing and torch.is_grad_enabled():
            layer = partial(checkpoint, layer, use_reentrant=False)
        return hidden_states(self.decoder, batch, layer)

    def backward(self, batch: Batch, targets: Targets, ce_share: float) -> Loss:
        """Leave the gradients of a batch's loss in the weights that require one, and return the loss."""
        hidden_nd = self.hidden(batch)[batch.predictors_n]
        result = drafter_loss(hidden_nd, self.decoder.head_weight, targets, ce_share)
        result.total.backward()  # type: ignore[no-untyped-call]
        return result

    @torch.no_grad()
    def choices(self, batch: Batch) -> Tensor:
        """Return the likeliest token at each position that predicts a continuation token, [positions]."""
        hidden_nd, head_vd = self.hidden(batch)[batch.predictors_n], self.decoder.head_weight
        rows = max(1, CHUNK_LOGITS // len(head_vd))
        return torch.cat([(part @ head_vd.T).argmax(-1) for part in torch.split(hidden_nd, rows)])


def hidden_states(decoder: Decoder, batch: Batch, layer: Callable[..., Any]) -> Tensor:
    """Run packed rows through a decoder, layer by layer, and return the last hidden states, [tokens, hidden].

    Args:
        decoder: the model.
        batch: packed rows.
        layer: `run_layer`, or what a compiler made of it.
    """
    x_1td = decoder.model.embed_tokens(batch.tokens_t[None])
    rotary = rotary_tables(batch.positions_t[None], decoder.config)
    bounds_s = batch.bounds_s
    torch._dynamo.maybe_mark_dynamic(bounds_s, 0)
    for one in decoder.model.layers:
        x_1td = layer(one, x_1td, rotary, bounds_s, batch.longest)
    hidden_1td: Tensor = decoder.model.norm(x_1td)
    hidden_td: Tensor = hidden_1td[0]
    return hidden_td


def run_layer(layer: Layer, x_1td: Tensor, rotary: tuple[Tensor, Tensor], bounds_s: Tensor,
              longest: int) -> Tensor:
    """Return the residual stream of packed rows after one layer, [1, tokens, hidden]."""

    def attend(queries_1htd: Tensor, keys_1ktd: Tensor, values_1ktd: Tensor) -> Tensor:
        parts = (x[0].transpose(0, 1).contiguous() for x in (queries_1htd, keys_1ktd, values_1ktd))
        out_thd: Tensor = packed_attention(*parts, bounds_s, longest)[0]
        return out_thd.transpose(0, 1)[None]

    result: Tensor = layer(x_1td, rotary, attend)
    return result
