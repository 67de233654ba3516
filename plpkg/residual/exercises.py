"""The checkers of notebook 02's exercises."""

from random import Random

import torch

from plpkg.exercise import Verdict, check_function, check_number
from plpkg.residual.attacks import recover_m
from plpkg.residual.wire.writing import Writing


def tokens_until_m(answer: object) -> Verdict:
    """How many tokens must the cloud have seen before it can compute an M of rank 64 exactly?"""
    return check_number(
        answer,
        expected=64,
        unit="tokens",
        tolerance=0.001,
        explanation="64 tokens give 64 equations for each row of M, which has 64 unknowns.",
        hints={
            4096: "that is how many entries M has; each token gives 64 equations, one for each row.",
            63: "63 equations for the 64 unknowns of each row leave one direction open.",
            1: "one token gives M u for a single u.",
        },
        hint="Count unknowns and equations for one row of M: v_i = Σ_j M_ij u_j.",
    )


def steal(function: object) -> Verdict:
    """``steal(u, v)``: the M ``(r_d2c, r_c2d)`` that explains the pairs ``(tokens, r_c2d)`` and ``(tokens, r_d2c)``."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for n, width_in, width_out in ((40, 6, 6), (30, 4, 7)):
        u, m, rest = (
            torch.randn(*size, generator=generator) for size in ((n, width_in), (width_out, width_in), (n, 1))
        )
        v = u @ m.T + 0.1 * rest  # no M explains it exactly
        cases.append(((u, v), recover_m(u, v).float()))

    def hint(got, u, v):
        if torch.allclose(got, recover_m(u, v).float().T, atol=1e-4):
            return "that is M transposed; the pairs are rows, so that v = u Mᵀ"
        few = recover_m(u[: u.shape[1]], v[: u.shape[1]]).float()
        return "all tokens count, not the first r alone" if torch.allclose(got, few, rtol=0.05, atol=1e-2) else ""

    return check_function(function, cases, "what you wrote is the whole attack on a private M.", hint)


def accept(function: object) -> Verdict:
    """``accept(guesses, choices)``: what is written after a pass over k guesses.

    ``choices`` are the device's own: the token behind the text, and behind each guess.
    """
    random, cases = Random(0), []
    greedy = dict(do_sample=False, temperature=1.0, top_k=0, top_p=1.0)
    for _ in range(20):
        guesses = random.choices(range(3), k=random.randint(0, 5))
        choices = [*(guess if random.random() < 0.6 else 4 for guess in guesses), random.choice(range(3))]
        text = Writing(torch.zeros(1, 1, dtype=torch.long), 99, [], None, None, 5, False, None, **greedy)
        logits = torch.nn.functional.one_hot(torch.tensor([choices]), 5).float()
        written = [token.item() for token, _ in text.take(logits, guesses)]
        cases.append(((guesses, choices), written))

    def hint(got, guesses, choices):
        if got and got == [*choices[: len(got) - 1], *guesses[len(got) - 1 : len(got)]]:
            return "the last token is the device's own choice, not the guess"
        return "a guess counts if the device has chosen the same, and all guesses before it counted"

    return check_function(function, cases, "the text is the one that the device writes alone, in fewer passes.", hint)
