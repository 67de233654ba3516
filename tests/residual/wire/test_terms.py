import copy
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import plpkg
from plpkg.residual import split
from plpkg.residual.wire.terms import FINGERPRINTS, OPTIONS, Limits, differences, terms


def terms_of(adapted, cut=(0, 0), precision="fp16", **config):
    model = adapted(**config)
    return terms(model, split(model)[0], [], "default", cut, precision)


def test_every_difference_is_named_with_both_values(adapted):
    ours = terms_of(adapted)
    assert not differences(ours, ours)
    for field in ours.DESCRIPTOR.fields:
        theirs = copy.deepcopy(ours)
        if field.is_repeated:
            getattr(theirs, field.name).append(7)
        else:
            value = getattr(ours, field.name)
            setattr(theirs, field.name, value + "x" if isinstance(value, str) else value + 1)
        shown = (list(getattr(t, field.name)) if field.is_repeated else getattr(t, field.name) for t in (ours, theirs))
        shown = (value if isinstance(value, str) else repr(value) for value in shown)
        expected = "{} {} here, {} on the cloud".format(OPTIONS.get(field.name, field.name), *shown)
        if field.name in FINGERPRINTS:
            expected = f"{FINGERPRINTS[field.name]} here than on the cloud"
        assert differences(ours, theirs) == expected
    assert ours.projections == [3, 3, 3, 3]
    assert ours.targets == "k_proj, q_proj, v_proj of layers 0, 1, 2, 3"


def test_a_refusal_names_the_options_of_the_command(adapted):
    of = functools.partial(terms_of, adapted)
    said = differences(of(r_c2d=32, r_d2c=32), of(r_c2d=30, r_d2c=30, target_modules=["o_proj"]))
    assert said.startswith(
        "--target k_proj, q_proj, v_proj of layers 0, 1, 2, 3 here, o_proj of layers 0, 1, 2, 3 on the"
    )
    assert said.endswith("; --rank 32 here, 30 on the cloud")  # once: the two ranks differ alike
    said = differences(of(projection_seed=1), of((1, 2), "fp32"))
    assert said == (
        "--seed 1 here, 0 on the cloud; --precision fp16 here, fp32 on the cloud; --first-k 0 here, 1 on the cloud; "
        "--last-k 0 here, 2 on the cloud"
    )
    assert of(layers_to_transform=[2, 3]).targets == "k_proj, q_proj, v_proj of layers 2, 3"
    assert differences(of(), of(options={"rms_norm_eps": 0.5})) == "another --model here than on the cloud"
    with pytest.raises(ValueError, match="precision must be one of 'fp16', 'bf16', 'fp32', got 'int8'"):
        of(precision="int8")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (dict(sessions=0), "sessions must be a whole number of at least 1, got 0"),
        (dict(tokens=1.5), "tokens must be"),
        (dict(answer_s=0), "answer_s must be greater than 0, got 0"),
        (dict(idle_s=float("inf")), "idle_s must be greater than 0, got inf"),
    ],
)
def test_impossible_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_the_generated_code_is_that_of_the_protocol_file(tmp_path):
    root = Path(plpkg.__file__).parent.parent
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}"]
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    done = subprocess.run(
        [*command, *outputs, str(root / "plpkg/residual/wire/wire.proto")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    stored, anew = (Path(f, "plpkg/residual/wire/wire_pb2.py").read_text() for f in (root, tmp_path))
    stub = "plpkg/residual/wire/wire_pb2.pyi"
    assert (root / stub).read_text() == (tmp_path / stub).read_text()
    descriptor = [line for line in stored.splitlines() if line.startswith("DESCRIPTOR = ")]
    assert descriptor == [line for line in anew.splitlines() if line.startswith("DESCRIPTOR = ")]
