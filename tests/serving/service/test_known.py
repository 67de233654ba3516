"""What a store has said: for how long it is not asked again, and for how long believed when it does not answer."""

import asyncio
from types import SimpleNamespace

import pytest

from plpkg.serving.service import known as module
from plpkg.serving.service.known import DamagedError, Known


class Source:
    """What is asked: an answer, an error, or None where it hangs."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    async def __call__(self):
        self.asked += 1
        if self.answer == "hangs":
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "HANGING_S", 0.01)
    return clock


@pytest.mark.parametrize("failure", ["hangs", OSError("down")], ids=str)
async def test_what_is_known_is_taken_for_a_while(failure, clock):
    known, source = Known(refresh_s=5, stale_s=60), Source("v1")
    assert await known.get("a/b", source) == "v1"
    source.answer = failure
    for clock.now in (104.9, 105.0, 109.9, 130.0, 159.9):
        assert await known.get("a/b", source) == "v1"
    assert source.asked == 4, "it asks each time, or never"
    source.answer = OSError("down")  # a store that hangs would be waited for
    clock.now = 160.0
    for _ in range(2):
        with pytest.raises(OSError, match="down"):
            await known.get("a/b", source)
    source.answer = "v2"
    assert await known.get("a/b", source) == "v2"
    clock.now = 1000.0
    await known.get("a/c", source)
    assert known._said.keys() == {"a/c"}, "names are kept for ever"


async def test_what_is_not_known_is_asked(clock):
    known, source = Known(5, 60), Source(OSError("down"))
    with pytest.raises(OSError, match="down"):
        await known.get("a/b", source)
    source.answer = None
    assert await known.get("a/b", source) is None
    clock.now += 5
    source.answer = OSError("down")
    with pytest.raises(OSError, match="down"):  # that there was none is no reason to say so now
        await known.get("a/b", source)


async def test_what_is_damaged_is_said(clock):
    known, source = Known(5, 60), Source("v1")
    await known.get("a/b", source)
    clock.now, source.answer = 105.0, DamagedError("no version")
    with pytest.raises(DamagedError):
        await known.get("a/b", source)


@pytest.mark.parametrize("written", ["v2", None])
async def test_what_is_written_meanwhile_wins_over_what_was_known(written, clock):
    known, source = Known(0, 60), Source("v1")
    await known.get("a/b", source)

    async def fails_when_it_is_written():
        known.change("a/b", written)
        source.answer = written
        ask.ask = source
        raise OSError("down")

    async def ask():
        return await ask.ask()

    ask.ask = fails_when_it_is_written
    assert await known.get("a/b", ask) == written
