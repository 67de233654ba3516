"""The checker of notebook 04's exercise."""

from plpkg.exercise import Verdict, check_number


def peak_units(answer: object) -> Verdict:
    """Llama-3.1's published setting (b = 16,384, B = 1,024, 100 local tokens): the most units that a head holds."""
    return check_number(
        answer,
        expected=17_408,
        unit="units",
        tolerance=1e-4,
        explanation="16,384 that were kept and a chunk of 1,024; the 100 local tokens come when the last chunk is cut.",
        hints={
            16_384: "that is what is left after a cut; attention comes before it.",
            16_484: "that is what is left at the end, with the local tokens.",
            17_508: "when the local tokens run, the last chunk has been cut already.",
            131_072: "that would be the full cache of a 128K prompt.",
            18_884: "the stabilizers are among the units that are kept, not beside them.",
            19_908: "the stabilizers are among the units that are kept, not beside them.",
        },
        hint="A chunk first attends to what is kept and to itself; only then is the cache cut.",
    )
