"""Words are compared with a search of the text letter by letter."""

import hashlib
import itertools

import pytest
from hypothesis import given, strategies as st

from plpkg.corpora import Document, Vocabulary, sentences
from plpkg.corpora.words import BEGIN, UNKNOWN

text = st.text(st.sampled_from("abZÉßñшЖ中'’ .,!?:;\n-_0127½²Ⅷ٣\t\"") | st.characters(codec="utf-8"), max_size=60)


@st.composite
def documents(draw):
    body = draw(text)
    edges = sorted(draw(st.sets(st.integers(0, len(body)), max_size=6)))
    return Document("d", body, tuple(zip(edges[::2], edges[1::2], strict=False)))


def of(body, masked=()):
    return list(sentences(Document("d", body, masked)))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("The cat sat. It slept!", [["the", "cat", "sat"], ["it", "slept"]]),
        ("Why? Because: this; that", [["why"], ["because"], ["this"], ["that"]]),
        ("numpy.linalg.norm at 3.5 is 2,000", [["numpy", "linalg", "norm", "at", "is"]]),
        ("don't stop", [["don't", "stop"]]),
        ("rock 'n' roll, dogs' 'quoted'", [["rock", "n", "roll", "dogs", "quoted"]]),
        ("one\nline", [["one", "line"]]),
        ("one\n \nparagraph", [["one"], ["paragraph"]]),
        ("snake_case x1 v2.0", [["snake", "case", "x", "v"]]),
        ("ÉTÉ Straße ЖУК 猫", [["été", "straße", "жук", "猫"]]),
        ("1 + 2 = 3!", []),
        ("", []),
    ],
)
def test_words_and_sentences(body, expected):
    assert of(body) == expected


def letter(character):
    r"""A letter, or one of the numerals that Python's \w has and its \d has not: ½, ², Ⅷ."""
    return character.isalnum() and not character.isdecimal()


def runs(piece):
    """The longest runs of letters, found one by one."""
    return ["".join(run) for letters, run in itertools.groupby(piece.lower(), letter) if letters]


@given(documents())
def test_words_are_the_runs_of_letters_of_what_is_not_masked(document):
    found = [run for words in sentences(document) for word in words for run in word.replace("’", "'").split("'")]
    assert found == [run for piece in document.unmasked() for run in runs(piece)]
    assert all(words for words in sentences(document))


@given(text, text, text)
def test_what_is_masked_never_appears(before, secret, after):
    document = Document("d", before + secret + after, ((len(before), len(before + secret)),) if secret else ())
    assert list(sentences(document)) == (of(before) + of(after) if secret else of(before + after))


def test_a_sign_divides_sentences_only_before_a_space():
    for sign in ".!?:;":
        assert of(f"a{sign} b") == [["a"], ["b"]]
        assert of(f"a{sign}b") == [["a", "b"]]
    assert of("a… b") == [["a", "b"]]


DOCUMENTS = [Document("a", "the cat and the dog"), Document("b", "a dog and a cat. The owl secret", ((25, 31),))]


def test_the_most_frequent_words_follow_the_two_ids_that_are_no_words():
    words = Vocabulary.of(DOCUMENTS, 7).words
    assert words == ("<unknown>", "<begin>", "the", "a", "and", "cat", "dog")
    assert Vocabulary.of(DOCUMENTS[::-1], 7).words == words
    assert Vocabulary.of(DOCUMENTS, 3).words == words[:3]
    assert Vocabulary.of(DOCUMENTS).words[7:] == ("owl",)
    vocabulary = Vocabulary.of(DOCUMENTS)
    assert (vocabulary.words[UNKNOWN], vocabulary.words[BEGIN]) == ("<unknown>", "<begin>")
    assert not set(vocabulary.words[:2]) & {word for words in of("<unknown> and <begin>") for word in words}


@given(st.lists(documents(), max_size=4), st.integers(3, 30))
def test_no_word_that_is_left_out_is_more_frequent(several, size):
    vocabulary = Vocabulary.of(several, size)
    counts = {}
    for word in (word for document in several for words in sentences(document) for word in words):
        counts[word] = counts.get(word, 0) + 1
    kept = vocabulary.words[2:]
    assert len(vocabulary) == min(size, len(counts) + 2)
    ranks = [(-counts[word], word) for word in kept]
    assert ranks == sorted(ranks)
    assert all((-n, word) > ranks[-1] for word, n in counts.items() if word not in kept)
    assert vocabulary.ids([*kept, "no-word"]) == [*range(2, len(vocabulary)), UNKNOWN]


def test_the_fingerprint_is_of_the_words_in_their_order():
    one = Vocabulary(["<unknown>", "<begin>", "a", "b"])
    assert one.sha256 == hashlib.sha256(b"<unknown>\n<begin>\na\nb").hexdigest()
    assert one.sha256 == Vocabulary(one.words).sha256 != Vocabulary(["<unknown>", "<begin>", "b", "a"]).sha256


@pytest.mark.parametrize("size", [2, 0, 2.5])
def test_a_vocabulary_without_a_word_is_refused(size):
    with pytest.raises(ValueError, match=f"size must be a whole number of at least 3, got {size}"):
        Vocabulary.of(DOCUMENTS, size)
