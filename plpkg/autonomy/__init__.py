"""Learning on the device: what a cloud has pre-trained on public data, each makes its owner's. Nothing leaves it."""

from typing import TYPE_CHECKING

from plpkg.autonomy import availability, nets
from plpkg.autonomy.augment import augment_images, eda
from plpkg.autonomy.evaluation import Evaluation, evaluate
from plpkg.autonomy.fleet import fleet
from plpkg.autonomy.nets import HeadSplit, MobileNet, WordLSTM, pretrained, vocabulary
from plpkg.autonomy.online import OnlineLearner
from plpkg.autonomy.personal import Transfer, load
from plpkg.autonomy.prune import prune
from plpkg.autonomy.transfer import Task, transfer
from plpkg.autonomy.windows import learn_in_windows
from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.autonomy import baselines, exercises, plots, widget
    from plpkg.autonomy.compile import three_graphs
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "Evaluation",
    "HeadSplit",
    "MobileNet",
    "OnlineLearner",
    "Task",
    "Transfer",
    "WordLSTM",
    "augment_images",
    "availability",
    "baselines",
    "eda",
    "evaluate",
    "exercises",
    "fleet",
    "learn_in_windows",
    "load",
    "nets",
    "plots",
    "pretrained",
    "prune",
    "three_graphs",
    "transfer",
    "vocabulary",
    "widget",
]
