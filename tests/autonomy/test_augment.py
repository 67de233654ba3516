import ast
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import ndimage

from plpkg.autonomy.augment import OPERATIONS, STOP_WORDS, augment_images, eda

from preloaded import Process
from rounding import assert_close, sampling_error

SENTENCE = ["The", "quick", "fox", "is", "in", "the", "big", "Garden"]
SYNONYMS = {"quick": ["fast", "swift"], "big": ["large", "huge", "vast"], "Garden": ["yard"]}
THESAURUS = SYNONYMS | {"the": ["wrong"], "The": ["wrong"]}  # stop words
NEW = {"fast", "swift", "large", "huge", "vast", "yard"}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def synonyms(word):
    return THESAURUS.get(word, [])


def change(operation, seed=0, sentence=SENTENCE, **options):
    return eda(sentence, operation, seeded(seed), synonyms=synonyms, **options)


@given(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(1, 9), st.floats(0, 1))
def test_the_sentence_stays_as_it_was(operation, seed, n, p):
    sentence = list(SENTENCE)
    assert change(operation, seed, sentence, n=n, p=p) == change(operation, seed, tuple(sentence), n=n, p=p)
    assert sentence == SENTENCE
    assert change(operation, seed, [], n=n, p=p) == []
    generator = seeded(seed)
    assert eda(sentence, "duplicate", generator) == SENTENCE
    assert torch.equal(generator.get_state(), seeded(seed).get_state())  # the control draws nothing


@given(st.integers(0, 200), st.integers(1, 5))
def test_so_many_words_become_a_synonym_of_theirs(seed, n):
    changed = [(a, b) for a, b in zip(SENTENCE, change("synonym", seed, n=n), strict=True) if a != b]
    assert len(changed) == min(n, 3)  # three have synonyms, and "the" is a stop word
    assert all(b in THESAURUS[a] and a not in STOP_WORDS for a, b in changed)


def test_each_word_and_each_synonym_has_its_chance():
    draws, generator = 3000, seeded(1)
    drawn = Counter()
    for _ in range(draws):
        drawn.update(set(eda(SENTENCE, "synonym", generator, synonyms=synonyms)) - set(SENTENCE))
    assert drawn.keys() == NEW
    for options in SYNONYMS.values():
        share = 1 / 3 / len(options)
        assert all(abs(drawn[each] / draws - share) < sampling_error(share * (1 - share), draws) for each in options)


def test_a_word_that_occurs_twice_is_two_words():
    assert sorted(change("synonym", sentence=["big", "big"])) in [sorted(["big", each]) for each in THESAURUS["big"]]


@given(st.integers(0, 200), st.integers(1, 5))
def test_insertions_are_synonyms_in_any_place(seed, n):
    longer = change("insert", seed, n=n)
    rest = iter(longer)
    assert len(longer) == len(SENTENCE) + n
    assert all(word in rest for word in SENTENCE)  # in their order
    assert set(longer) - set(SENTENCE) <= NEW


def test_insertions_come_first_last_and_between():
    places = {tuple(word in THESAURUS["big"] for word in change("insert", seed, ["big", "fox"])) for seed in range(60)}
    assert places == {(True, False, False), (False, True, False), (False, False, True)}
    assert change("insert", sentence=["the", "fox"]) == ["the", "fox"]  # nothing has a synonym


@given(st.integers(0, 200), st.integers(1, 4))
def test_swaps_move_two_words_each(seed, n):
    words = [*"abcdefgh"]
    swapped = change("swap", seed, words, n=n)
    moved = sum(a != b for a, b in zip(words, swapped, strict=True))
    assert sorted(swapped) == words
    assert moved <= 2 * n
    assert moved == 2 or n > 1
    assert change("swap", seed, ["one"], n=n) == ["one"]


def test_deletion_keeps_the_order_and_its_probability():
    words, generator = [str(k) for k in range(4000)], seeded(3)
    left = eda(words, "delete", generator, p=0.3)
    assert left == sorted(left, key=int)
    assert abs(len(left) / len(words) - 0.7) < sampling_error(0.3 * 0.7, len(words))
    assert eda(words, "delete", generator, p=0) == words
    assert {tuple(eda(["a", "b"], "delete", generator, p=1)) for _ in range(40)} == {("a",), ("b",)}  # one stays


def test_the_generator_decides_in_any_process():
    code = (
        "[eda('cat dog bird fish'.split(), operation, torch.Generator().manual_seed(4000), n=2, p=0.5,"
        " synonyms=lambda word: [word + 'a', word + 'b']) for operation in OPERATIONS]"
    )
    there = f"import torch; from plpkg.autonomy.augment import OPERATIONS, eda; print({code})"
    with Process(there) as process:  # which has another order of a set of strings
        assert ast.literal_eval(process.stdout.read()) == eval(code)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (dict(operation="shuffle"), "operation must be one of 'synonym', .*, got 'shuffle'"),
        (dict(operation="synonym", synonyms=None), "operation='synonym' needs synonyms, got None"),
        (dict(operation="insert", synonyms=str.upper), "synonyms of a word must be a sequence of words, got '"),
        (dict(operation="insert", synonyms=None), "operation='insert' needs synonyms, got None"),
        (dict(operation="swap", n=0), "n must be a whole number of at least 1, got 0"),
        (dict(operation="delete", p=1.5), "p must be at least 0 and at most 1, got 1.5"),
        (dict(operation="swap", sentence="a text"), "a sentence must be a sequence of words, got 'a text'"),
    ],
)
def test_wrong_arguments_are_named(given_, message):
    with pytest.raises(ValueError, match=message):
        eda(**dict(sentence=SENTENCE, generator=seeded(), synonyms=synonyms) | given_)


def pictures(count=4, channels=2, height=9, width=13, seed=0):
    return torch.rand(count, channels, height, width, generator=seeded(seed), dtype=torch.float64)


def test_half_of_the_images_are_flipped():
    images = pictures(400, 1, 3, 5)
    mirrored = (augment_images(images, seeded(), flip=True) - images).flatten(1).abs().amax(1) > 0.01
    assert abs(mirrored.double().mean() - 0.5) < sampling_error(0.25, len(images))


def steps(shape, turn, zoom, mirrored, moved, window, crop):
    """Where a pixel (row, column, 1) comes to lie: mirrored, turned, magnified, moved, its window drawn out."""
    height, width = shape
    middle = np.array([[1, 0, (1 - height) / 2], [0, 1, (1 - width) / 2], [0, 0, 1]])
    turned = np.array([[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]])
    to = np.array([[1, 0, moved[1]], [0, 1, moved[0]], [0, 0, 1]])
    ends = np.array([[1, 0, 0.5 - window[1]], [0, 1, 0.5 - window[0]], [0, 0, 1]])  # from the window's edges
    drawn = np.diag([height / (height - crop), width / (width - crop), 1])
    half = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    change = to @ np.diag([zoom, zoom, 1]) @ turned @ np.diag([1, -1 if mirrored else 1, 1])
    return half @ drawn @ ends @ np.linalg.inv(middle) @ change @ middle


@pytest.mark.parametrize("shape", [(9, 13), (16, 7), (10, 10)])
@pytest.mark.parametrize(
    "options",
    [
        dict(degrees=35),
        dict(scale=0.4),
        dict(translate=3, flip=True),
        dict(crop=4),
        dict(flip=True, degrees=180, scale=0.3, crop=3, translate=2),
    ],
)
def test_all_together_are_scipy_s_interpolation(monkeypatch, shape, options):
    draws = []
    for name in ("rand", "randint"):
        draw = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, draw=draw, **k: draws.append(draw(*a, **k)) or draws[-1])
    images = pictures(6, 2, *shape)
    draws.clear()
    changed = augment_images(images, seeded(7), **options)
    places, moved, window = (each.double().numpy() for each in draws)
    turns = math.radians(options.get("degrees", 0)) * (2 * places[0] - 1)
    zooms = 1 + options.get("scale", 0) * (2 * places[1] - 1)
    mirrored = (places[2] > 0.5) & options.get("flip", False)
    for k, image in enumerate(images):
        forth = steps(shape, turns[k], zooms[k], mirrored[k], moved[k], window[k], options.get("crop", 0))
        back = np.linalg.inv(forth)
        for channel, found in zip(image, changed[k], strict=True):
            wanted = ndimage.affine_transform(channel.numpy(), back[:2, :2], back[:2, 2], order=1, mode="nearest")
            # Some sixteen roundings in float32 make a coordinate, up to a side long; a pixel's step is at most 1.
            assert_close(found.float(), torch.from_numpy(wanted).float(), 16 * sum(shape), 1.0)


def test_the_ranges_are_kept(monkeypatch):
    draws, whole = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **k: draws.append(whole(*a, **k)) or draws[-1])
    augment_images(pictures(3000, 1, 4, 4), seeded(), translate=2, crop=3)
    assert [set(draw.flatten().tolist()) for draw in draws] == [{-2, -1, 0, 1, 2}, {0, 1, 2, 3}]


def test_zeros_are_an_equal_copy():
    images = pictures()
    copy = augment_images(images, seeded())
    assert torch.equal(copy, images)
    copy.zero_()
    assert images.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_generator_decides_and_every_image_has_its_own_draw(dtype):
    images = pictures(1).to(dtype).expand(5, -1, -1, -1)
    options = dict(flip=True, degrees=20, scale=0.2, crop=2, translate=1, noise=0.1)
    changed = augment_images(images, seeded(2), **options)
    assert torch.equal(changed, augment_images(images, seeded(2), **options))
    assert not torch.equal(changed, augment_images(images, seeded(3), **options))
    assert (changed.dtype, changed.shape) == (dtype, images.shape)
    assert len({image.numpy().tobytes() for image in changed}) == 5
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_noise_has_its_deviation_and_is_clamped():
    grey = torch.full((8, 1, 40, 40), 0.5)
    noise = augment_images(grey, seeded(), noise=0.05) - 0.5
    assert abs(noise.mean()) < sampling_error(0.05**2, noise.numel())
    assert abs(noise.std() / 0.05 - 1) < sampling_error(0.5, noise.numel())
    loud = augment_images(grey, seeded(), noise=5.0)
    assert (loud.min(), loud.max()) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(flip=1), "flip must be True or False, got 1"),
        (dict(degrees=181), "degrees must be at least 0 and at most 180, got 181"),
        (dict(scale=1), "scale must be at least 0 and at most 0.9, got 1"),
        (dict(translate=10), "translate must be between 0 and 9, got 10"),
        (dict(translate=0.5), "translate must be a whole number between 0 and 9, got 0.5"),
        (dict(crop=9), "crop must be between 0 and 8, got 9"),
        (dict(noise=-1), "noise must be at least 0, got -1"),
        (dict(images=pictures()[0]), r"images must be floats from 0 to 1, .*, got torch.float64 \(2, 9, 13\)"),
        (dict(images=pictures() * 2), "images must be floats from 0 to 1"),
        (dict(images=pictures() * math.nan), "images must be floats from 0 to 1"),
        (dict(images=torch.zeros(1, 1, 2, 2, dtype=torch.uint8)), "got torch.uint8"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        augment_images(**dict(images=pictures(), generator=seeded()) | options)
