"""Tau on dev during training: one teacher-forced pass over packed conversations."""

from itertools import pairwise

import torch
from torch import Tensor

from drafter.replay import Conversation, Steps, Tau, simulate, summary
from stages.training.batches import collate, cut
from stages.training.network import Network
from stages.training.rows import Row

BATCH_TOKENS = 8192


def simulated_tau(network: Network, conversations: list[Conversation], device: str) -> Tau:
    """Simulate tau of the weights that a network holds."""
    return summary(conversations, simulated_steps(network, conversations, device))


def simulated_steps(network: Network, conversations: list[Conversation], device: str) -> list[Steps]:
    """Return the steps that a network would take on each conversation; only choices leave the device."""
    rows = [_row(conversation) for conversation in conversations]
    sizes = torch.tensor([len(row.prompt) + len(row.continuation) - 1 for row in rows])
    choices: list[Tensor] = []
    for part in _parts(rows, cut(sizes, max(BATCH_TOKENS, int(sizes.max())))):
        found = network.choices(collate(part).to(device)).cpu()
        choices += torch.split(found, [len(row.continuation) for row in part])
    return [simulate(choice == row.continuation) for choice, row in zip(choices, rows, strict=True)]


def _row(conversation: Conversation) -> Row:
    continuation = torch.tensor(conversation.continuation)
    nothing = torch.empty(len(continuation), 0)
    return Row(torch.tensor(conversation.prompt), continuation, nothing, nothing)


def _parts(rows: list[Row], counts: list[int]) -> list[list[Row]]:
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    return [rows[first:last] for first, last in pairwise(ends)]
