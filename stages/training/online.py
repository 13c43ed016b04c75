"""The target's whole distribution, for as long as it fits beside the drafter.

One pass of the target over the training rows leaves its last hidden states; a matrix product with its output
matrix gives all logits of a position again, whenever they are needed.
"""

from dataclasses import replace
from typing import Any

import torch

from drafter.model import Decoder
from stages.errors import UserError
from stages.job import Job
from stages.models.target import load_target
from stages.training.batches import Selection, collate, cut
from stages.training.loss import Targets
from stages.training.network import hidden_states, run_layer

BATCH_TOKENS = 32_768
HELD_SHARE = 0.25  # of the device's free memory; beyond it the states stay in host memory


def target_states(job: Job, settings: Any) -> "TargetStates | None":
    """Load the target where the settings ask for its whole distribution."""
    if settings.kl == "top-k":
        return None
    target = job.config.target
    decoder = load_target(job.inputs["fetch"] / target.source, target.format, settings.dtype, job.device)
    return TargetStates(decoder, job.device)


class TargetStates:
    """The target's last hidden states at each trained position.

    Args:
        target: the target, in the compute type, on its device.
        device: where the drafter is trained.
    """

    def __init__(self, target: Decoder, device: str) -> None:
        self.target: Decoder | None = target  # until its states are taken: only the output matrix stays
        self.head_vh, self.device = target.head_weight, device
        self.states_nh = torch.empty(0)
        self.firsts = torch.empty(0)
        self.sizes = torch.empty(0)

    @torch.no_grad()
    def prepare(self, kept: Selection, vocab_size: int) -> None:
        """Run the target once over the rows.

        Raises:
            UserError: the drafter has not the target's vocabulary.
        """
        if vocab_size != len(self.head_vh) or self.target is None:
            raise UserError(f"kl = 'whole' compares distributions over one vocabulary: the target has "
                            f"{len(self.head_vh)} ids, the drafter {vocab_size}; choose kl = 'top-k'")
        self.sizes = kept.targets
        self.firsts = kept.targets.cumsum(0) - kept.targets
        shape = (int(kept.targets.sum()), self.target.config.hidden_size)
        self.states_nh = torch.empty(shape, dtype=self.head_vh.dtype, device=self._place(shape))
        at = first = 0
        for count in cut(kept.sizes, max(BATCH_TOKENS, int(kept.sizes.max()))):
            batch = collate([kept[row] for row in range(first, first + count)]).to(self.device)
            found = hidden_states(self.target, batch, run_layer)[batch.predictors_n]
            self.states_nh[at : at + len(found)] = found
            at, first = at + len(found), first + count
        self.target = None

    def join(self, known: Targets, rows: list[int]) -> Targets:
        """Add the hidden states of a batch's rows to what is known of its targets."""
        firsts, sizes = self.firsts[rows].tolist(), self.sizes[rows].tolist()
        index_n = torch.cat([torch.arange(first, first + size) for first, size in zip(firsts, sizes,
                                                                                       strict=True)])
        hidden_nh = self.states_nh[index_n.to(self.states_nh.device)].to(self.device)
        return replace(known, hidden_nh=hidden_nh, head_vh=self.head_vh)

    def _place(self, shape: tuple[int, int]) -> str:
        if self.device != "cuda":
            return self.device
        free, _ = torch.cuda.mem_get_info()
        return "cuda" if shape[0] * shape[1] * self.head_vh.element_size() < HELD_SHARE * free else "cpu"
