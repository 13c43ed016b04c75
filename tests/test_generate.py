"""Generation for the teacher: greedy with top-k, ends, and seeded sampling."""

from collections import Counter

import pytest
import torch
from conftest import small_decoder

from drafter.engine import Engine, Generated, Generation

DECODER = small_decoder("qwen3", seed=41, tied=False)
ENGINE = Engine(DECODER, 96)
PROMPTS = [list(range(first, first + size)) for first, size in ((3, 1), (9, 14), (20, 2), (31, 40), (50, 5))]


@torch.inference_mode()
def logits(text: list[int]) -> torch.Tensor:
    """The logits after each token of a text, from a whole pass without cache, [tokens, vocab]."""
    return DECODER.logits(DECODER(torch.tensor([text]), torch.arange(len(text))[None])[0])


def greedy(prompt: list[int], cap: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + cap:
        text.append(int(logits(text)[-1].argmax()))
    return text[len(prompt) :]


FREE = [greedy(prompt, 40) for prompt in PROMPTS]


def tokens(rows: list[Generated]) -> list[list[int]]:
    return [row.tokens for row in rows]


def test_is_the_greedy_continuation_up_to_the_cap() -> None:
    made = ENGINE.generate(PROMPTS, Generation(max_tokens=40))
    assert tokens(made) == FREE
    assert {row.ended for row in made} == {"cap"}
    assert all(row.topk_ids.shape == row.topk_logprobs.shape == (40, 0) for row in made)
    assert tokens(ENGINE.generate(PROMPTS, Generation(max_tokens=1))) == [free[:1] for free in FREE]


def test_a_stop_id_is_the_last_token() -> None:
    stops = (FREE[0][4], FREE[3][11])
    made = ENGINE.generate(PROMPTS, Generation(max_tokens=40, stop_ids=stops))
    ends = set()
    for row, free in zip(made, FREE, strict=True):
        end = next((i + 1 for i, token in enumerate(free) if token in stops), len(free))
        assert row.tokens == free[:end]
        assert row.ended == ("stop" if free[end - 1] in stops else "cap")
        ends.add(end)
    assert len(ends) > 1  # rows left the batch at different times


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ends_before_the_n_gram_that_recurs(size: int) -> None:
    decoder = small_decoder("qwen3", seed=41)
    with torch.no_grad():  # a model that soon goes round in circles
        for layer in decoder.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
    plain = Engine(decoder, 128).generate(PROMPTS, Generation(max_tokens=80, top_k=3))
    made = Engine(decoder, 128).generate(PROMPTS, Generation(max_tokens=80, top_k=3, stop_on_repeat=size))
    assert "repeat" in {row.ended for row in made}
    for row, whole in zip(made, plain, strict=True):
        grams = [tuple(whole.tokens[i : i + size]) for i in range(len(whole.tokens) - size + 1)]
        second = next((i for i, gram in enumerate(grams) if gram in grams[:i]), None)
        assert row.tokens == whole.tokens[:second]
        assert row.ended == ("cap" if second is None else "repeat")
        assert torch.equal(row.topk_ids, whole.topk_ids[:second])
        assert torch.equal(row.topk_logprobs, whole.topk_logprobs[:second])


@pytest.mark.parametrize("limit", [None, 50])
def test_top_k_is_that_of_the_whole_distribution(limit: int | None) -> None:
    made = Engine(DECODER, 96, token_limit=limit).generate(PROMPTS, Generation(max_tokens=12, top_k=5))
    for prompt, row in zip(PROMPTS, made, strict=True):
        assert row.topk_ids[:, 0].tolist() == row.tokens
        whole_tv = logits(prompt + row.tokens[:-1])[len(prompt) - 1 :, :limit]
        expected = whole_tv.double().log_softmax(-1).topk(5)
        assert row.topk_ids.tolist() == expected.indices.tolist()
        torch.testing.assert_close(row.topk_logprobs.double(), expected.values, atol=1e-4, rtol=0)


def test_the_order_of_prompts_changes_nothing() -> None:
    settings = Generation(max_tokens=20, stop_ids=(FREE[0][4],), top_k=2)
    made = ENGINE.generate(PROMPTS, settings)
    order = [3, 0, 4, 2, 1]
    shuffled = ENGINE.generate([PROMPTS[i] for i in order], settings)
    assert tokens(shuffled) == [made[i].tokens for i in order]
    assert all(torch.equal(row.topk_ids, made[i].topk_ids) for row, i in zip(shuffled, order, strict=True))
    assert tokens([ENGINE.generate([prompt], settings)[0] for prompt in PROMPTS]) == tokens(made)


@pytest.mark.parametrize(("size", "fits"), [(86, True), (87, False), (500, False)])
def test_a_prompt_that_leaves_no_room_is_refused(size: int, fits: bool) -> None:
    prompts = [[1], [2] * size]
    if fits:
        assert len(ENGINE.generate(prompts, Generation(max_tokens=10))[1].tokens) == 10
    else:
        with pytest.raises(ValueError, match=f"{size + 10} tokens do not fit a context of 96"):
            ENGINE.generate(prompts, Generation(max_tokens=10))


def test_sampling_repeats_by_seed() -> None:
    first, again, other = (
        tokens(ENGINE.generate(PROMPTS, Generation(max_tokens=20, temperature=1.0, seed=seed)))
        for seed in (7, 7, 8)
    )
    assert first == again
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))
    assert first != FREE


def test_a_sample_does_not_depend_on_which_rows_have_ended() -> None:
    whole = tokens(ENGINE.generate(PROMPTS, Generation(max_tokens=30, temperature=0.8, seed=3)))
    stops = (whole[0][2], whole[3][9])
    made = ENGINE.generate(PROMPTS, Generation(max_tokens=30, temperature=0.8, seed=3, stop_ids=stops))
    for row, free in zip(made, whole, strict=True):
        end = next((i + 1 for i, token in enumerate(free) if token in stops), len(free))
        assert row.tokens == free[:end]
    assert len({len(row.tokens) for row in made}) > 2


@pytest.mark.parametrize(("temperature", "top_p"), [(1.5, 1.0), (1.5, 0.6), (0.7, 0.9)])
def test_samples_follow_the_distribution(temperature: float, top_p: float) -> None:
    prompt, draws = [5, 6, 7], 4000
    made = ENGINE.generate([prompt] * draws, Generation(1, temperature=temperature, top_p=top_p, seed=1))
    found = Counter(row.tokens[0] for row in made)
    ordered = (logits(prompt)[-1].double() / temperature).softmax(-1).sort(descending=True)
    size = int((ordered.values.cumsum(-1) < top_p).sum()) + 1  # the smallest set of that much probability
    expected = ordered.values[:size] / ordered.values[:size].sum()
    assert found.keys() <= set(ordered.indices[:size].tolist())
    distance = sum(abs(found[int(token)] / draws - float(p)) for token, p in
                   zip(ordered.indices[:size], expected, strict=True)) / 2  # fmt: skip
    assert distance < 0.06  # about twice what 4,000 draws over so many ids give


def test_a_tiny_nucleus_is_greedy() -> None:
    made = ENGINE.generate(PROMPTS, Generation(max_tokens=10, temperature=1.0, top_p=1e-6))
    assert tokens(made) == [free[:10] for free in FREE]
