"""Which beginnings are shared, and which are forgotten."""

import torch

from plpkg.serving.attention import KeyValues
from plpkg.serving.prefixes import BLOCK, Prefixes

IDS = list(range(3 * BLOCK))
OWNER = ("digest", "account")


POSITION = 8
"""Bytes of one, in :func:`filled`: a key and a value of float32."""


def filled(capacity):
    past = KeyValues(capacity)
    past.write(0, 0, torch.arange(1.0, capacity + 1).view(-1, 1, 1) * torch.tensor([1, -1]))
    return past


def test_whole_blocks_that_end_before_the_last_token():
    prefixes, past = Prefixes(10_000), filled(len(IDS))
    prefixes.keep(OWNER, IDS, past)
    for length, shared in ((BLOCK, 0), (BLOCK + 1, 1), (2 * BLOCK, 1), (2 * BLOCK + 1, 2), (3 * BLOCK, 2)):
        assert prefixes.find(OWNER, IDS[:length]) == ((past, shared * BLOCK) if shared else (None, 0))
    assert prefixes.find(OWNER, [*IDS, 1, 2]) == (past, 3 * BLOCK)
    assert prefixes.find(OWNER, [*IDS[: BLOCK + 3], 0, *IDS[BLOCK + 4 :]]) == (past, BLOCK)


def test_nothing_else_is_shared():
    prefixes = Prefixes(10_000)
    prefixes.keep(OWNER, IDS, filled(len(IDS)))
    others = [("digest", "another"), ("another", "account"), ("", "account"), ("digest', 'acc", "ount")]
    for owner, ids in (*((owner, IDS) for owner in others), (OWNER, [1, *IDS[1:]]), (OWNER, IDS[BLOCK:])):
        assert prefixes.find(owner, ids) == (None, 0)


def test_what_was_used_longest_ago_goes_first():
    prefixes, pasts = Prefixes(2 * len(IDS) * POSITION), [filled(len(IDS)) for _ in range(3)]
    for account, past in zip("ab", pasts, strict=False):
        prefixes.keep(("", account), IDS, past)
    assert prefixes.find(("", "a"), IDS)[0] is pasts[0]
    prefixes.keep(("", "c"), IDS, pasts[2])
    assert [prefixes.find(("", account), IDS)[0] for account in "abc"] == [pasts[0], None, pasts[2]]
    assert prefixes.num_bytes == 2 * len(IDS) * POSITION == sum(past.num_bytes for past in pasts[::2])


def test_nothing_is_kept_over_the_capacity():
    for capacity in (0, len(IDS) * POSITION - 1):
        prefixes = Prefixes(capacity)
        prefixes.keep(OWNER, IDS, filled(len(IDS)))
        assert (prefixes.num_bytes, prefixes.find(OWNER, IDS), prefixes._blocks) == (0, (None, 0), {})


def test_a_copy_has_the_first_positions_and_room_of_its_own():
    past, copy = filled(8), KeyValues(12)
    copy.copy(past, 5)
    keys, values = copy.write(0, 5, torch.zeros(2, 1, 2)).flatten(0, 1).T.tolist()
    assert keys == [1, 2, 3, 4, 5, 0, 0]
    assert values == [-1, -2, -3, -4, -5, 0, 0]
    assert past.layers[0][5, 0].tolist() == [6, -6]


def test_a_text_that_went_on_is_found_when_its_beginning_has_gone():
    prefixes, ids = Prefixes(6 * BLOCK * POSITION), list(range(4 * BLOCK))
    first, longer, other = filled(2 * BLOCK), filled(4 * BLOCK), filled(2 * BLOCK)
    for past, text in ((first, ids[: 2 * BLOCK]), (longer, ids), (other, ids[1 : 2 * BLOCK + 1])):
        prefixes.keep(("", ""), text, past)
    assert prefixes.num_bytes == 6 * BLOCK * POSITION
    assert prefixes.find(("", ""), [*ids, 0]) == (longer, 4 * BLOCK)


def test_what_is_forgotten_is_one_owners():
    prefixes, pasts = Prefixes(10_000), [filled(len(IDS)) for _ in range(3)]
    for owner, ids, past in ((OWNER, IDS, pasts[0]), (OWNER, [*IDS, *IDS], pasts[1]), (("", "account"), IDS, pasts[2])):
        prefixes.keep(owner, ids, past)
    prefixes.forget(OWNER)
    assert prefixes.find(OWNER, IDS) == (None, 0)
    assert prefixes.find(("", "account"), [*IDS, 0]) == (pasts[2], len(IDS))
    assert ({*prefixes._blocks.values()}, prefixes.num_bytes) == ({pasts[2]}, pasts[2].num_bytes)
