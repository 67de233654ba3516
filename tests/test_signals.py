"""What signals do to a command: they end it, and its cleaning up goes on."""

import signal
import threading

import pytest

from plpkg.signals import ended_by_ctrl_c, ended_by_signals

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture
def untouched():
    """The handlers are afterwards as they were."""
    before = [signal.getsignal(number) for number in ENDING]
    yield
    assert [signal.getsignal(number) for number in ENDING] == before


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN, lambda *_: None])
def test_ctrl_c_ends_a_command_that_imports_unless_it_is_handled_otherwise(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with ended_by_ctrl_c():
            within = signal.getsignal(signal.SIGINT)
        assert within is (signal.SIG_DFL if handler is signal.default_int_handler else handler)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", ENDING)
@pytest.mark.usefixtures("untouched")
def test_a_signal_interrupts_once(first):
    with pytest.raises(KeyboardInterrupt), ended_by_signals():  # noqa: PT012 (what is raised within, and that once)
        try:
            signal.raise_signal(first)
            pytest.fail("not interrupted")
        finally:
            for number in ENDING:
                signal.raise_signal(number)


@pytest.mark.usefixtures("untouched")
def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ended", [ended_by_ctrl_c, ended_by_signals])
@pytest.mark.usefixtures("untouched")
def test_another_thread_changes_no_handler(ended):
    seen = []

    def run():
        with ended():
            seen.extend(signal.getsignal(number) for number in ENDING)

    before = [signal.getsignal(number) for number in ENDING]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == before
