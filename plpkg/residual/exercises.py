"""The checkers of the exercises of notebooks 02 and 09."""

import torch

from plpkg.residual.attacks import recover_tokens
from plpkg.show.exercise import Verdict, check_function, check_number


def tokens_until_m(answer: object) -> Verdict:
    """How many tokens must the cloud have seen at least before it can compute an M of rank 64?"""
    practical = "a good number in practice, where rounding disturbs; how many are needed at least, in exact numbers?"
    return check_number(
        answer,
        expected=64,
        unit="tokens",
        tolerance=0.001,
        explanation="64 tokens give 64 equations for each row of M, which has 64 unknowns.",
        hints={
            96: practical,
            128: practical,
            4096: "that is how many entries M has; each token gives 64 equations, one for each row.",
            63: "63 equations for the 64 unknowns of each row leave one direction open.",
            1: "one token gives M u for a single u.",
        },
        hint="Count unknowns and equations for one row of M: v_i = Σ_j M_ij u_j.",
    )


def read_labels(function: object) -> Verdict:
    """``read_labels(hidden, gradient, head)``: each token's label, from the gradient of its loss at the hidden state.

    ``hidden`` and ``gradient`` are ``(tokens, hidden)``, ``head`` is ``(vocab, hidden)``.
    """
    generator, cases = torch.Generator().manual_seed(0), []
    for tokens, vocab, width in ((12, 40, 12), (9, 30, 12)):
        hidden, head = (torch.randn(n, width, generator=generator) for n in (tokens, vocab))
        head *= torch.linspace(0.5, 2, vocab)[:, None]  # long rows and short ones
        label = torch.randint(vocab, (tokens,), generator=generator)
        wrong = (hidden @ head.T).softmax(-1) - torch.nn.functional.one_hot(label, vocab)
        cases.append(((hidden, wrong @ head, head), label))

    def hint(got, hidden, gradient, head):
        logits = hidden @ head.T
        p = logits.softmax(-1)
        row = p @ head - gradient
        no_p = "without the softmax of hidden: the gradient is headᵀ(p - e), so that p is needed"
        turned = "the gradient is headᵀ(p - e): take it from headᵀp, and not the other way round"
        known = (
            (p.argmax(-1), "that is what the model would have written; the label is what it should have"),
            (recover_tokens(-gradient, head), no_p),
            ((-gradient @ head.T).argmax(-1), no_p),
            ((gradient @ head.T).argmax(-1), no_p),
            (
                recover_tokens(logits.softmax(0) @ head - gradient, head),
                "the softmax goes over the vocabulary, not over the tokens",
            ),
            (recover_tokens(-row, head), turned),
            (recover_tokens(logits @ head - gradient, head), "p is the softmax of the logits, and not the logits"),
            ((row @ head.T).argmax(-1), "the nearest row is the label's; a long row has a large product with much"),
        )
        return next((reason for tokens, reason in known if torch.equal(got.long(), tokens)), "")

    return check_function(function, cases, "whoever trains across the wire shows every label.", hint)


def pays_from(function: object) -> Verdict:
    """``pays_from(tokens, t_1, t_k, round_trips)``: the RTT in seconds from which guesses pay, 0 if they always do.

    A pass without guesses takes ``t_1`` and yields one token, one with guesses ``t_k`` and yields ``tokens``.
    """

    def right(tokens: float, t_1: float, t_k: float, round_trips: float) -> float:
        return max(0.0, (t_k - tokens * t_1) / (tokens - 1) / round_trips)

    cases = [(case, right(*case)) for case in ((1.8, 0.01, 0.03, 6), (3.0, 0.01, 0.05, 1), (2.4, 0.02, 0.03, 6))]

    def hint(got, tokens, t_1, t_k, round_trips):
        if got < 0:
            return "a delay is never negative: where guesses pay without any, the answer is 0"
        known = {
            "a pass has several round trips, each of one RTT": (t_k - tokens * t_1) / (tokens - 1),
            "seconds are wanted, not milliseconds": 1e3 * right(tokens, t_1, t_k, round_trips),
            "compare times for as many tokens: a pass with guesses yields several": (t_k - t_1) / round_trips,
            "compare times for as many tokens, tokens · t_1 with t_k": (t_k - t_1) / (tokens - 1) / round_trips,
            "guesses save tokens - 1 passes": (t_k - tokens * t_1) / tokens / round_trips,
            "guesses save the waits of tokens - 1 passes": (t_k - tokens * t_1) / round_trips,
        }
        return next((reason for reason, value in known.items() if abs(got - value) < 1e-9), "")

    return check_function(function, cases, "that is the rule by which the package stops guesses.", hint)
