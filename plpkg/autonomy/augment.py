"""Data augmentation on the device: more sentences and images from those that a person has.

Four operations on words are EDA's (Wei & Zou 2019, arXiv:1901.11196); those on images are the usual ones of AutLearn.
Augmented data are more steps of training, too, so beside them stands a control of as many steps: ``"duplicate"``, and
:func:`augment_images` with nothing but zeros. EDA keeps a sentence's label; where a model learns the next word, a
changed word is a changed label. EDA's published code shuffles a set, whose order changes with the process, and takes
``synonyms[0]`` of any word to insert; here every draw is the generator's, from what the paper names.

Left out: splitting text into words, a thesaurus, operations on one image after another.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import affine_grid, grid_sample

from plpkg.validation import flag, number, one_of, whole_number

OPERATIONS = ("synonym", "insert", "swap", "delete", "duplicate")
FUNCTION_WORDS = "a an and are as at be but by can do for from had has have he i if in is it its me my no not of on or"
STOP_WORDS = frozenset(f"{FUNCTION_WORDS} she so that the their them they this to up was we were who you".split())
"""Words that :func:`eda` gives no synonym."""


def eda(
    sentence: Sequence[str],
    operation: str,
    generator: torch.Generator,
    *,
    synonyms: Callable[[str], Sequence[str]] | None = None,
    n: int = 1,
    p: float = 0.1,
) -> list[str]:
    """One of EDA's operations on the words of a sentence.

    Parameters
    ----------
    operation
        ``"synonym"``: ``n`` words become a synonym of theirs, each drawn at random, as all is here. ``"insert"``:
        ``n`` times, a synonym of a word comes in somewhere. ``"swap"``: ``n`` times, two words change places.
        ``"delete"``: each word goes with probability ``p``, but one stays. ``"duplicate"``: nothing, the control.
    synonyms
        Of a word, always in one order; the first two need it, and pass over words without any and :data:`STOP_WORDS`.

    Raises
    ------
    ValueError
        Another operation, numbers out of range, text that is not in words, or no ``synonyms`` where it needs some.
    """
    one_of("operation", operation, OPERATIONS)
    whole_number("n", n, 1)
    number("p", p, high=1.0)
    if isinstance(sentence, str):
        raise ValueError(f"a sentence must be a sequence of words, got {sentence[:60]!r}")
    words = list(sentence)

    def one(options: Sequence):
        return options[int(torch.randint(len(options), (), generator=generator))]

    def several(options: Sequence, count: int) -> list:
        return [options[k] for k in torch.randperm(len(options), generator=generator)[:count].tolist()]

    found: dict[int, Sequence[str]] = {}  # a word's place: its synonyms
    if operation in ("synonym", "insert"):
        if synonyms is None:
            raise ValueError(f"operation={operation!r} needs synonyms, got None")
        found = _synonyms(words, synonyms)
    if operation == "synonym":
        for k in several(list(found), n):
            words[k] = one(found[k])
    elif operation == "insert" and found:
        for _ in range(n):
            place = one(range(len(words) + 1))
            of_word = one(list(found))
            words.insert(place, one(found[of_word]))
    elif operation == "swap" and len(words) > 1:
        for _ in range(n):
            i, j = several(range(len(words)), 2)
            words[i], words[j] = words[j], words[i]
    elif operation == "delete" and words:
        stays = torch.rand(len(words), generator=generator) >= p  # (words,)
        left = [word for word, stay in zip(words, stays.tolist(), strict=True) if stay]
        words = left or [one(words)]
    return words


def _synonyms(words: list[str], synonyms: Callable[[str], Sequence[str]]) -> dict[int, Sequence[str]]:
    """By its place, the synonyms of each word that has any."""
    found = {}
    for k, word in enumerate(words):
        if word.lower() in STOP_WORDS:
            continue
        options = synonyms(word)
        if isinstance(options, str):
            raise ValueError(f"synonyms of a word must be a sequence of words, got {options[:60]!r}")
        if len(options):
            found[k] = options
    return found


def augment_images(
    images: torch.Tensor, generator: torch.Generator, *, flip=False, degrees=0, scale=0, crop=0, translate=0, noise=0
) -> torch.Tensor:
    """Change each image at random, all at once; what comes in from outside repeats the border.

    Parameters
    ----------
    images
        ``(images, channels, height, width)``, floating point, from 0 to 1; so is what comes back.
    flip
        Half of them are mirrored, left to right.
    degrees, scale, translate
        Turned by up to so much either way, magnified by 1 ± ``scale``, moved by up to so many whole pixels.
    crop, noise
        A random window this many pixels smaller is drawn out to the old size; then noise of this deviation is added.

    The recorded digits are turned and scaled alone: ``flip`` makes other digits, and of eight pixels one is far. The
    rest is for photographs, as AutLearn's.

    Raises
    ------
    ValueError
        Images of another kind, or a number out of range.
    """
    of_kind = images.dim() == 4 and images.is_floating_point()
    if not of_kind or not ((images >= 0) & (images <= 1)).all():
        what = f"{images.dtype} {tuple(images.shape)}"
        raise ValueError(f"images must be floats from 0 to 1, (images, channels, height, width), got {what}")
    flag("flip", flip)
    sides = images.shape[2:]
    turn, zoom, side = 2 * torch.rand(3, len(images), generator=generator) - 1  # (images,) each, from -1 to 1
    turn = math.radians(number("degrees", degrees, high=180)) * turn
    zoom = 1 + number("scale", scale, high=0.9) * zoom
    mirror = 1 - 2 * flip * side.gt(0)  # (images,)
    limit = whole_number("translate", translate, 0, min(sides))
    moved = torch.randint(-limit, limit + 1, (len(images), 2), generator=generator)  # (images, 2)
    crop = whole_number("crop", crop, 0, min(sides) - 1)
    window = torch.randint(crop + 1, (len(images), 2), generator=generator) - crop / 2  # (images, 2)
    result = images.clone()  # (images, channels, height, width)
    if flip or degrees or scale or crop or translate:
        cos = turn.cos() / zoom
        sin = turn.sin() / zoom
        back = torch.stack([mirror * cos, -mirror * sin, sin, cos], 1).view(-1, 2, 2)  # of a pixel's way, x before y
        size = torch.tensor(sides[::-1])  # (2,)
        # From pixels to the grid's -1 to 1, which are as far apart on a long side as on a short one.
        scaled = back * (size - crop)  # (images, 2, 2)
        offset = back @ (window - moved).unsqueeze(2) * 2  # (images, 2, 1)
        theta = torch.cat([scaled, offset], 2) / size[:, None]
        grid = affine_grid(theta.to(images), list(images.shape), align_corners=False)  # (images, height, width, 2)
        result = grid_sample(images, grid, padding_mode="border", align_corners=False)
    if number("noise", noise):
        result += noise * torch.randn(images.shape, generator=generator).to(images)
    return result.clamp_(0, 1)
