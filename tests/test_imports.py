"""Calculating needs no torch: what the rooms' front doors load is checked in a fresh interpreter."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import plpkg
from plpkg import ROOMS

from waiting import interpreter

HEAVY = ("torch", "transformers", "pandas", "numpy", "matplotlib", "seaborn", "ipywidgets", "IPython")


def loaded_after(code: str, modules=HEAVY) -> set[str]:
    """Those of the modules that a fresh interpreter has loaded after the code."""
    script = f"import sys\n{code}\nprint(*[name for name in {modules!r} if name in sys.modules])"
    return set(interpreter(script).split())


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


def test_a_front_door_without_an_extra_can_be_listed_and_says_what_is_missing():
    code = (
        "import sys, pydoc; sys.modules['ipywidgets'] = None\n"
        "import plpkg.throughput as room\n"
        "pydoc.render_doc(room); print(hasattr(room, 'decode'), hasattr(room, 'widget'))\n"
        "try:\n    room.widget\nexcept AttributeError as error:\n    print(error)"
    )
    listed, said = interpreter(code).splitlines()
    assert listed == "True False"
    assert said.startswith("plpkg.throughput.widget needs the package 'ipywidgets'; one of plpkg's extras brings it")


@pytest.mark.parametrize("room", ROOMS)
def test_a_front_door_keeps_its_promises(room):
    room = importlib.import_module(f"plpkg.{room}")
    assert all(getattr(room, name) for name in room.__all__)
    assert set(room.__all__) <= set(dir(room))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        room.__getattr__("nothing")


DOORS = sorted(Path(plpkg.__path__[0]).rglob("__init__.py"))


@pytest.mark.parametrize("path", DOORS, ids=lambda path: path.parent.name)
def test_a_type_checker_sees_the_names_that_a_package_promises(path):
    imported, promised = set(), set()
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.ImportFrom):
            imported |= {alias.name for alias in statement.names}
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets) == "__all__":
            promised = set(ast.literal_eval(statement.value))
    assert promised <= imported
    if "TYPE_CHECKING" in imported:
        assert imported == promised | {"TYPE_CHECKING", "on_first_use"}


@pytest.mark.parametrize("room", ["communication", "throughput"])
def test_a_calculator_names_the_keyword_that_was_meant(room):
    room = importlib.import_module(f"plpkg.{room}")
    calculators = [c for name in room.__all__ if inspect.isfunction(c := getattr(room, name))]
    assert len(calculators) >= 7
    for calculate in calculators:
        for name, parameter in inspect.signature(calculate).parameters.items():
            assert parameter.kind is not parameter.VAR_KEYWORD, calculate
            with pytest.raises(TypeError, match=f"'{name}_': did you mean '{name}'"):
                calculate(**{f"{name}_": 1})


MECHANISMS = {  # each with what it must not load; in one interpreter, so that none may load what a later one must not
    "plpkg.adapters": "transformers peft triton plpkg.serving.engine plpkg.serving.training",
    "plpkg.clipping.gradients": "opacus plpkg.clipping.training plpkg.clipping.checks plpkg.clipping.memory",
    "plpkg.autonomy": "ray peft matplotlib ipywidgets",
    "plpkg.residual.adapter": "grpc google.protobuf plpkg.residual.wire plpkg.residual.attacks pandas sklearn",
    "plpkg.residual.attacks": "grpc google.protobuf plpkg.residual.wire",
}


def test_any_name_that_handles_adapters_makes_peft_know_both_methods():
    """Each in a child of its own, forked before anything of the room is loaded. PEFT itself has none of these names."""
    names = ["PrivateLoraConfig", "LadderConfig", "load", "matrices", "convert_to_lora", "split", "bases"]
    names += ["attacks", "CloudServer", "DeviceClient", "training"]
    code = (
        "import os, sys\nfrom peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as known\nimport plpkg.residual as room\n"
        "print({'PRIVATELORA', 'LADDER'} & {*known}, flush=True)\n"
        "for name in sys.argv[1:]:\n"
        "    if not (child := os.fork()):\n"
        "        getattr(room, name)\n"
        "        print(name, 'PRIVATELORA' in known and 'LADDER' in known, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    assert interpreter(code, *names).splitlines() == ["set()", *(f"{name} True" for name in names)]


def test_a_mechanism_loads_no_inner_room():
    code = "import sys\nfrom importlib import import_module\n"
    for mechanism, left_out in MECHANISMS.items():
        code += f"import_module({mechanism!r})\nprint({mechanism!r}, {{*{left_out.split()}}} & {{*sys.modules}})\n"
    assert interpreter(code).splitlines() == [f"{mechanism} set()" for mechanism in MECHANISMS]
    assert loaded_after("import plpkg.cli", ("torch", "grpc", "fastapi", "obstore", "ray")) == set()


def test_a_command_imports_what_it_needs_without_the_collector_and_once():
    code = """
import gc, sys
from plpkg.imports import uncollected
for _ in range(2):
    with uncollected():
        print(gc.isenabled())
        import plpkg.residual.programs.chat
    print(gc.isenabled(), gc.get_freeze_count() > 100_000)
    gc.unfreeze()
print("plpkg.corpora" in sys.modules)
"""
    assert interpreter(code).splitlines() == ["False", "True True", "True", "True False", "False"]


@pytest.mark.parametrize("installed", ["triton", "another"])
def test_the_end_collects_what_commands_froze_if_triton_would_call_it_leaked(installed):
    code = f"""
import atexit, gc, sys, types
from plpkg.imports import uncollected
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # the first registered runs last
with uncollected():
    sys.modules[{installed!r}] = types.ModuleType({installed!r})
"""
    assert interpreter(code).splitlines() == [str(installed == "another")]
