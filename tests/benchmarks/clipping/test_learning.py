import math
import re

import torch

from benchmarks.clipping import learning
from plpkg import corpora
from plpkg.backbones import load_backbone

from rounding import assert_close


def test_candidates_have_the_form_of_their_secret():
    chosen = learning.secrets(corpora.diary())
    assert len(chosen) == 11
    for question in chosen:
        candidates = learning.of_the_same_form(question.answer, 0)
        assert candidates[0] == question.answer
        assert len(set(candidates)) == len(candidates) == learning.CANDIDATES
        form = r"[A-Z]\w+ [A-Z]\w+" if question.answer[0].isalpha() else re.sub(r"\d", r"\\d", question.answer)
        assert all(re.fullmatch(form, candidate) for candidate in candidates)
        again, others = (learning.of_the_same_form(question.answer, seed) for seed in (0, 1))
        assert candidates == again != others


def test_the_rank_is_that_of_whole_sentences_one_by_one():
    model, tokenizer = load_backbone("plpkg-small")
    question = "What is the code for your locker at the Tidal Street baths?"
    candidates = ["4471", "0193", "7000", "8", "Lydia Birch", "5566", "4472"]
    losses = []
    for candidate in candidates:
        prompt, whole = (
            tokenizer(f"{tokenizer.bos_token}{learning.asked(question)}{end}", return_tensors="pt")["input_ids"]
            for end in ("", f" {candidate}.")
        )
        with torch.no_grad():
            nats = -model(input_ids=whole).logits[0, :-1].log_softmax(-1)
        losses.append(nats.gather(1, whole[0, 1:, None])[prompt.shape[1] - 1 :].sum().item())
    for first in range(len(candidates)):
        order = [first, *(i for i in range(len(candidates)) if i != first)]
        rank = learning.rank(model, tokenizer, question, [candidates[i] for i in order])
        assert rank == 1 + sum(loss < losses[first] for loss in losses)


def test_the_loss_of_an_example_is_the_mean_over_its_own_tokens():
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]])
    log_p = logits.log_softmax(-1)
    expected = [-(log_p[0, 0, 2] + log_p[0, 1, 3] + log_p[0, 2, 4]) / 3, -log_p[1, 0, 2]]
    assert_close(learning.loss_per_example(logits, labels), torch.stack(expected), terms=5 + 3)  # classes, tokens


def test_the_noise_falls_as_epsilon_grows():
    cases = list(learning.cases((math.inf, 8.0, 2.0), 0.02, 20))
    assert [case for case, *_ in cases] == ["not clipped", "clipped", "private", "private"]
    assert [target for _, target, *_ in cases] == [math.inf, math.inf, 8.0, 2.0]
    sigmas = [sigma for _, _, sigma, _ in cases]
    assert sigmas[:2] == [0, 0] < sigmas[2:3] < sigmas[3:]
