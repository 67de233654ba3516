"""Learning on the device: what a cloud has pre-trained on public data, each device makes its owner's. Nothing leaves.

The names a notebook imports; each loads on first use.
"""

from plpkg.lazy import on_first_use

PLACES = dict(
    Evaluation="examples",
    Examples="examples",
    Person="examples",
    evaluate="examples",
    token_examples="examples",
    word_examples="examples",
    MobileNet="nets",
    WordLSTM="nets",
    pretrained="nets",
    vocabulary="nets",
    nets="nets",
    Task="transfer",
    Transfer="transfer",
    transfer="transfer",
    OnlineLearner="online",
    learn_in_windows="windows",
    availability="availability",
    eda="augment",
    augment_images="augment",
    prune="prune",
    three_graphs="compile",
    baselines="baselines",
    fleet="fleet",
    exercises="exercises",
    plots="plots",
    widget="widget",
)

__all__ = [*PLACES]
__getattr__ = on_first_use(__name__, **PLACES)
