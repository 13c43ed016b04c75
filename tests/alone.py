"""What drafts are held to: transformers' own models, run afresh for one request, without cache or batch."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from drafter.model import EMBEDDING, HEAD, Decoder

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
NEAR_TIE = 1e-4  # logits in float32 that lie closer together may be ordered either way
# As SmolLM2 and Qwen3 are, but small: three queries a key, and heads wider than a share of the hidden size.
SMALL = {
    "llama": {"num_attention_heads": 6, "rope_theta": 1e5, "rms_norm_eps": 1e-5},
    "qwen3": {"num_attention_heads": 4, "head_dim": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
}
VOCAB = 97


def reference(decoder: Decoder, family: str) -> PreTrainedModel:
    """The same shape and weights in transformers' own class."""
    config = decoder.config
    config_class, model_class = FAMILIES[family]
    theirs = model_class(
        config_class(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.layers,
            intermediate_size=config.intermediate_size, num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads, head_dim=config.head_dim, rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_eps, tie_word_embeddings=config.tied, eos_token_id=None,
            bos_token_id=None, pad_token_id=0, attn_implementation="eager",
        )
    )  # fmt: skip
    state = decoder.state_dict()
    theirs.load_state_dict(state | ({HEAD: state[EMBEDDING]} if config.tied else {}))
    return theirs.eval()


def small_model(family: str, seed: int) -> PreTrainedModel:
    """A small model made by transformers, its weights exact in bfloat16 and spread so that drafts differ."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    model = model_class(
        config_class(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
            num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3, eos_token_id=None,
            bos_token_id=None, pad_token_id=0, **SMALL[family],
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            weight.copy_(weight.bfloat16())
    return model.eval()


class Alone:
    """What a fresh run alone would draft: each id is the best one of a whole pass over all before it.

    Args:
        model: transformers' model, in float32.
        token_limit: ids from here on are never proposed.
    """

    def __init__(self, model: PreTrainedModel, token_limit: int | None = None) -> None:
        self.model = model
        self.token_limit = token_limit
        self.known: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        self.near_ties = 0

    def agrees(self, request: list[int], draft: list[int]) -> bool:
        """Say whether every id of a draft is greedy given those before it."""
        return draft == self.choices(request, draft)

    @torch.inference_mode()
    def choices(self, request: list[int], draft: list[int]) -> list[int]:
        """The best id after the request and after each id of the draft; a near-tie goes to the draft.

        By induction they are the draft if and only if the draft is the greedy run.
        """
        key = (tuple(request), tuple(draft))
        if key not in self.known:
            text = request + draft[:-1]
            logits_tv = self.model(torch.tensor([text]), use_cache=False).logits[0, len(request) - 1 :]
            best = logits_tv[:, : self.token_limit].topk(2)
            tied = (best.values[:, 0] - best.values[:, 1] < NEAR_TIE) & (
                best.indices[:, 1] == torch.tensor(draft)
            )
            self.near_ties += int(tied.sum())
            self.known[key] = torch.where(tied, torch.tensor(draft), best.indices[:, 0]).tolist()
        return self.known[key]

    @torch.inference_mode()
    def greedy(self, request: list[int], count: int) -> list[int]:
        """The greedy run itself, as transformers generates it."""
        vocab = self.model.config.vocab_size
        made = self.model.generate(
            torch.tensor([request]), attention_mask=torch.ones(1, len(request)), do_sample=False,
            use_cache=False, max_new_tokens=count,
            suppress_tokens=list(range(self.token_limit or vocab, vocab)) or None,
        )  # fmt: skip
        return made[0, len(request) :].tolist()


def cut(request: list[int], context: int, step: int) -> list[int]:
    """The last tokens that a request is drafted from: whole steps are cut off its front until it fits."""
    while len(request) > context:
        request = request[step:]
    return request
