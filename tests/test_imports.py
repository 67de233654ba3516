"""Calculating needs no torch: what the rooms' front doors load is checked in a fresh interpreter."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "pandas", "numpy", "matplotlib", "seaborn", "ipywidgets", "IPython")


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return set(output.split())


def test_calculators_load_nothing_heavy():
    code = (
        "import plpkg.communication, plpkg.throughput, plpkg.catalog as c\n"
        "plpkg.communication.low_rank('llama-7b'); plpkg.throughput.decode('llama-7b'); c.link('5g')\n"
        "repr(plpkg.throughput.best_rank('llama-7b', 20)); plpkg.communication.low_rank('gpt2')._repr_html_()"
    )
    assert loaded_after(code) == set()


def test_plots_and_widget_load_on_first_use():
    assert "matplotlib" not in loaded_after("import plpkg.throughput as t; t.decode")
    assert "ipywidgets" in loaded_after("import plpkg.throughput as t; t.widget.explorer")


def test_front_doors_keep_their_promises():
    code = (
        "import plpkg.communication as c, plpkg.throughput as t\n"
        "for room in (c, t):\n"
        "    for name in room.__all__: getattr(room, name)\n"
        "    try: room.nothing\n"
        "    except AttributeError as error: assert 'nothing' in str(error)\n"
        "    else: raise SystemExit('no error')\n"
    )
    loaded_after(code)
