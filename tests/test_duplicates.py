"""Near-duplicates by sketch, held to the Jaccard index itself."""

import random

import pytest

from stages.duplicates import PERMUTATIONS, NearDuplicates, bands, sketches

VOCABULARY = [f"word{number}" for number in range(2000)]


def text(rng: random.Random, length: int = 60) -> list[str]:
    return rng.choices(VOCABULARY, k=length)


def edited(words: list[str], count: int, rng: random.Random) -> list[str]:
    """The text with some words replaced, each more than two words from the next."""
    places = rng.sample(range(1, len(words) - 1, 3), count)
    return [rng.choice(VOCABULARY) if place in places else word for place, word in enumerate(words)]


def jaccard(one: list[str], two: list[str]) -> float:
    first, second = ({tuple(words[at : at + 3]) for at in range(len(words) - 2)} for words in (one, two))
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_is_clearly_alike_is_found_and_what_is_not_is_let_through(share: float) -> None:
    rng = random.Random(0)
    found = {True: 0, False: 0}
    seen = {True: 0, False: 0}
    for count in range(1, 15):
        for _ in range(25):
            one = text(rng)
            two = edited(one, count, rng)
            likeness = jaccard(one, two)
            if abs(likeness - share) < 0.1:  # about two standard errors of the estimate
                continue
            near = NearDuplicates(share)
            first, second = sketches([one, two])
            near.add(first)
            seen[likeness > share] += 1
            found[likeness > share] += near.like(second) is not None
    assert min(seen.values()) > 20
    assert found[True] >= 0.97 * seen[True]
    assert found[False] <= 0.03 * seen[False]


def test_the_most_similar_of_many_is_named() -> None:
    rng = random.Random(1)
    near, texts = NearDuplicates(0.5), [text(rng) for _ in range(3000)]
    for sketch in sketches(texts):
        near.add(sketch)
    for number in (0, 1, 1023, 1024, 2999):
        (sketch,) = sketches([edited(texts[number], 2, rng)])
        assert near.like(sketch) == number
    assert near.like(sketches([text(rng)])[0]) is None


def test_texts_of_one_and_two_words_are_compared_whole() -> None:
    near = NearDuplicates(0.8)
    one, same, other = sketches([["go", "on"], ["go", "on"], ["go", "off"]])
    near.add(one)
    assert near.like(same) == 0
    assert near.like(other) is None


@pytest.mark.parametrize(("share", "count"), [(0.3, 64), (0.5, 32), (0.8, 16), (0.95, 8)])
def test_bands_let_the_wanted_similarity_through(share: float, count: int) -> None:
    assert bands(share) == count
    rows = PERMUTATIONS // count
    assert 1 - (1 - share**rows) ** count > 0.85
