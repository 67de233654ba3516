"""The evaluation is the cross-entropy of all labels, and leaves the model as it was."""

import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from plpkg.autonomy.evaluation import evaluate, evaluate_logits
from plpkg.autonomy.nets import logits
from plpkg.backbones import FAMILIES
from plpkg.corpora.examples import IGNORED, Examples
from tests.autonomy.conftest import images, learner, same, samples, values

from rounding import relative


@pytest.mark.parametrize("name", ["lstm", "mobile", *FAMILIES])
def test_evaluation_is_the_cross_entropy_of_all_labels(name):
    model, examples = learner(name), samples(name, 150)  # more than one chunk
    with torch.no_grad():
        predicted = logits(model, examples.x).double().flatten(0, -2)  # (samples * seq, classes)
    labels = examples.y.flatten()
    evaluation = evaluate(model, examples)
    # evaluate_logits takes the logits in float32: log-softmax sums the classes, and the loss the labels
    terms = predicted.shape[1] + examples.labels
    exact = cross_entropy(predicted, labels, ignore_index=IGNORED).item()
    assert evaluation.loss == pytest.approx(exact, rel=relative(terms))
    right = (predicted.argmax(-1) == labels)[labels != IGNORED].double().mean().item()
    assert evaluation.accuracy == pytest.approx(right)
    assert evaluation.labels == examples.labels == (labels != IGNORED).sum()
    assert evaluation.rows() == [{"loss": evaluation.loss, "accuracy": evaluation.accuracy, "labels": examples.labels}]


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_leaves_the_mode_and_the_statistics(mode):
    model, noise = learner("mobile").train(mode), images(5)
    model.body[1].train(not mode)
    before = values(model)
    one, other = evaluate(model, noise), evaluate(copy.deepcopy(model).eval(), noise)
    assert one == other
    with pytest.raises(RuntimeError):
        evaluate(model, Examples(noise.x[:, :, 0], noise.y))
    assert (model.training, model.body[1].training) == (mode, not mode)
    assert same(model.state_dict(), before)


def test_a_loss_that_is_not_finite_is_no_evaluation():
    noise = images(5)
    noise.x[3] = math.nan
    with pytest.raises(FloatingPointError, match=r"the loss on Examples\(5 samples of .* is nan"):
        evaluate(learner("mobile"), noise)


def test_a_chunk_without_a_label_counts_nothing_and_no_label_at_all_is_refused():
    y = torch.full((65, 2), IGNORED)
    with pytest.raises(ValueError, match=r"no label to evaluate in Examples\(65 samples of \(2,\), 0 labels\)"):
        evaluate_logits(lambda batch: torch.zeros(0, 4), Examples(y, y))
    y[64, 1] = 3
    certain = torch.tensor([[0.0, 0.0, 0.0, 100.0]])
    evaluation = evaluate_logits(lambda batch: certain[: batch.labels], Examples(y, y))
    assert (evaluation.accuracy, evaluation.labels) == (1.0, 1)
    assert 0 <= evaluation.loss < 1e-40
