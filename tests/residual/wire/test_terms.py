import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plpkg
from plpkg.backbones import FAMILIES, fingerprint, random_backbone
from plpkg.residual import split
from plpkg.residual.wire.terms import Limits, differences, terms


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fingerprint_is_the_base_models_alone(adapted, family):
    model = adapted(family)
    plain = random_backbone(
        family, num_layers=4, num_kv_heads=4 if family == "gpt2" else 2, vocab=64, hidden=32, intermediate=48
    )
    found = fingerprint(plain)
    assert fingerprint(model.get_base_model()) == found
    assert fingerprint(adapted(family, m_scale=2.0).get_base_model()) == found
    assert fingerprint(plain.bfloat16()) == found
    with torch.no_grad():
        plain.get_output_embeddings().weight[0, 0] += 1
    assert fingerprint(plain) != found


def test_every_difference_is_named_with_both_values(adapted):
    model = adapted()
    device, _ = split(model)
    here = terms(model, device, "default", (0, 0), "fp16")
    assert not differences(here, here)
    for field in here.DESCRIPTOR.fields:
        there = type(here).FromString(here.SerializeToString())
        if field.is_repeated:
            there.projections.append(7)
        else:
            value = getattr(here, field.name)
            setattr(there, field.name, value + "x" if isinstance(value, str) else value + 1)
        found = differences(here, there)
        assert found.startswith(f"{field.name} is ")
        shown = (list(getattr(t, field.name)) if field.is_repeated else getattr(t, field.name) for t in (here, there))
        assert found == "{} is {!r} on the device and {!r} on the cloud".format(field.name, *shown)
    assert here.projections == [3, 3, 3, 3]
    assert here.targets == "k_proj, q_proj, v_proj of layers 0, 1, 2, 3"


def test_another_layer_or_setting_is_another_model(adapted):
    def of(**changes):
        model = adapted(**changes)
        return terms(model, split(model)[0], "default", (0, 0), "fp16")

    found = differences(of(layers_to_transform=[0, 1]), of(layers_to_transform=[2, 3]))
    assert found == "targets is 'k_proj, q_proj, v_proj of layers 0, 1' on the device and " + (
        "'k_proj, q_proj, v_proj of layers 2, 3' on the cloud"
    )
    assert differences(of(), of(options={"rms_norm_eps": 0.5})).startswith("model is ")


def test_an_unknown_precision_is_named(adapted):
    model = adapted()
    with pytest.raises(ValueError, match="precision must be one of 'fp16', 'bf16', 'fp32', got 'int8'"):
        terms(model, split(model)[0], "default", (0, 0), "int8")


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
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={tmp_path}"]
    subprocess.run([*command, str(root / "plpkg/residual/wire/wire.proto")], check=True)
    here, anew = (Path(f, "plpkg/residual/wire/wire_pb2.py").read_text() for f in (root, tmp_path))
    descriptor = [line for line in here.splitlines() if line.startswith("DESCRIPTOR = ")]
    assert descriptor == [line for line in anew.splitlines() if line.startswith("DESCRIPTOR = ")]
