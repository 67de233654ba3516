"""Which beginnings are shared, and which are forgotten."""

import torch

from plpkg.serving.attention import KeyValues
from plpkg.serving.prefixes import BLOCK, Prefixes

IDS = list(range(3 * BLOCK))
OWNER = ("digest", "account")


def filled(capacity):
    past = KeyValues(capacity)
    past.write(0, 0, *(torch.arange(1.0, capacity + 1).view(1, -1, 1) * sign for sign in (1, -1)))
    return past


def test_whole_blocks_that_end_before_the_last_token():
    prefixes, past = Prefixes(1000), filled(len(IDS))
    prefixes.keep(OWNER, IDS, past)
    for length, shared in ((BLOCK, 0), (BLOCK + 1, 1), (2 * BLOCK, 1), (2 * BLOCK + 1, 2), (3 * BLOCK, 2)):
        assert prefixes.find(OWNER, IDS[:length]) == ((past, shared * BLOCK) if shared else (None, 0))
    assert prefixes.find(OWNER, [*IDS, 1, 2]) == (past, 3 * BLOCK)
    assert prefixes.find(OWNER, [*IDS[: BLOCK + 3], 0, *IDS[BLOCK + 4 :]]) == (past, BLOCK)


def test_nothing_else_is_shared():
    prefixes = Prefixes(1000)
    prefixes.keep(OWNER, IDS, filled(len(IDS)))
    others = [("digest", "another"), ("another", "account"), ("", "account"), ("digest', 'acc", "ount")]
    for owner, ids in (*((owner, IDS) for owner in others), (OWNER, [1, *IDS[1:]]), (OWNER, IDS[BLOCK:])):
        assert prefixes.find(owner, ids) == (None, 0)


def test_what_was_used_longest_ago_goes_first():
    prefixes, pasts = Prefixes(2 * len(IDS)), [filled(len(IDS)) for _ in range(3)]
    for account, past in zip("ab", pasts, strict=False):
        prefixes.keep(("", account), IDS, past)
    assert prefixes.find(("", "a"), IDS)[0] is pasts[0]
    prefixes.keep(("", "c"), IDS, pasts[2])
    assert [prefixes.find(("", account), IDS)[0] for account in "abc"] == [pasts[0], None, pasts[2]]
    assert len(prefixes) == 2 * len(IDS)


def test_nothing_is_kept_over_the_capacity():
    for capacity in (0, len(IDS) - 1):
        prefixes = Prefixes(capacity)
        prefixes.keep(OWNER, IDS, filled(len(IDS)))
        assert (len(prefixes), prefixes.find(OWNER, IDS), prefixes._blocks) == (0, (None, 0), {})


def test_a_copy_has_the_first_positions_and_room_of_its_own():
    past, copy = filled(8), KeyValues(12)
    copy.copy(past, 5)
    keys, values = copy.write(0, 5, torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
    assert keys.flatten().tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert values.flatten().tolist() == [-1, -2, -3, -4, -5, 0, 0]
    assert past.layers[0][0][0, 5, 0] == 6


def test_a_text_that_went_on_is_found_when_its_beginning_has_gone():
    prefixes, ids = Prefixes(6 * BLOCK), list(range(4 * BLOCK))
    first, longer, other = KeyValues(2 * BLOCK), KeyValues(4 * BLOCK), KeyValues(2 * BLOCK)
    for past, text in ((first, ids[: 2 * BLOCK]), (longer, ids), (other, ids[1 : 2 * BLOCK + 1])):
        prefixes.keep(("", ""), text, past)
    assert len(prefixes) == 6 * BLOCK
    assert prefixes.find(("", ""), [*ids, 0]) == (longer, 4 * BLOCK)
