"""The learners: AutLearn's two networks, and how any model is split into a body and a head.

The paper's word predictor is a stacked LSTM over the 10,000 most frequent words, its image classifier a MobileNet
(Howard et al. 2017: depthwise separable convolutions). Both stand here in the sizes that one core trains in minutes.
A Hugging Face causal language model is the third learner. Left out: dropout, MobileNet's wider variants.
"""

import contextlib
import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from plpkg import catalog
from plpkg.corpora import Vocabulary
from plpkg.training_loop import logits_of
from plpkg.validation import one_of, whole_number


class WordLSTM(nn.Module):
    """Predicts the next word at every place: ids ``(batch, seq)`` to logits ``(batch, seq, vocab)``.

    Two LSTMs of one layer each, not one of two: so each can have its own width, before and after pruning.
    """

    def __init__(self, vocab: int = 10_000, embedding: int = 64, hidden: tuple[int, int] = (128, 96)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.lstm1 = nn.LSTM(embedding, hidden[0], batch_first=True)
        self.lstm2 = nn.LSTM(hidden[0], hidden[1], batch_first=True)
        self.head = nn.Linear(hidden[1], vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm1(self.embedding(ids))  # (batch, seq, hidden[0])
        states, _ = self.lstm2(states)  # (batch, seq, hidden[1])
        return self.head(states)


class MobileNet(nn.Module):
    """Classifies images: ``(batch, channels, height, width)`` to logits ``(batch, classes)``.

    A convolution, then for each further width a depthwise one, which halves the image, and a pointwise one.
    """

    def __init__(self, classes: int = 10, channels: int = 1, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        layers = [*_convolution(channels, widths[0])]
        for width, wider in pairwise(widths):
            layers += _convolution(width, width, stride=2, groups=width)
            layers += _convolution(width, wider, kernel=1)
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


def _convolution(n_in: int, n_out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> Iterator[nn.Module]:
    """A convolution that keeps height and width (over ``stride``), its BatchNorm and its ReLU."""
    yield nn.Conv2d(n_in, n_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    yield nn.BatchNorm2d(n_out)
    yield nn.ReLU()


def plain(model: Any) -> nn.Module:
    """The model itself, without what compiles, spreads or adapts it; adapters in its layers stay there.

    Raises
    ------
    ValueError
        PEFT gives it tokens of its own, which are not in its layers; or it is of Hugging Face, and no causal language
        model: an encoder reads the words that are to be predicted.
    """
    if hasattr(model, "_orig_mod"):  # of torch.compile
        return plain(model._orig_mod)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return plain(model.module)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(f"{type(model).__name__} puts virtual tokens before the text: take an adapter of the layers")
    if hasattr(model, "get_base_model"):
        return plain(model.get_base_model())
    if isinstance(model, PreTrainedModel) and (model.config.is_encoder_decoder or not model.can_generate()):
        raise ValueError(f"{type(model).__name__} is no causal language model")
    return model


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The logits that any of the learners makes of ``x``: ``(batch, ..., classes)``."""
    model = plain(model)
    with _known(model, x):
        if isinstance(model, PreTrainedModel):
            return model(input_ids=x, use_cache=False).logits
        return model(x)


@contextlib.contextmanager
def _known(model: nn.Module, x: torch.Tensor) -> Iterator[None]:
    """ValueError in place of the IndexError of an embedding that lacks an id, or a place."""
    try:
        yield
    except IndexError as error:
        if x.is_floating_point() or not x.numel():
            raise
        what = f"{tuple(x.shape)} with ids from {x.min()} to {x.max()}"
        raise ValueError(f"{type(model).__name__} lacks one of the ids or places of x, {what}") from error


class HeadSplit:
    """A model as a body, which makes features, and a head, which makes logits of them.

    Parameters
    ----------
    model
        A Hugging Face causal language model, or any module whose logits its last ``nn.Linear`` makes.

    Attributes
    ----------
    head
        The ``nn.Linear``.
    name
        Its name in the model.

    Raises
    ------
    ValueError
        No ``nn.Linear`` that could be the head.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = plain(model)
        linear = {name: m for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        if isinstance(self.model, PreTrainedModel):
            linear = {name: m for name, m in linear.items() if m is self.model.get_output_embeddings()}
        if not linear:
            raise ValueError(f"{type(self.model).__name__} has no nn.Linear that makes its logits")
        self.name, self.head = linear.popitem()  # the last one

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The head's input ``(batch, ..., features)``."""
        if isinstance(self.model, PreTrainedModel):
            with _known(self.model, x):
                return self.model.base_model(input_ids=x, use_cache=False).last_hidden_state
        parent, _, name = self.name.rpartition(".")
        parent = self.model.get_submodule(parent)
        setattr(parent, name, nn.Identity())
        try:
            with _known(self.model, x):
                return self.model(x)
        finally:
            setattr(parent, name, self.head)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The logits of features ``(batch, features)``, with a language model's own scale or soft cap."""
        if isinstance(self.model, PreTrainedModel):
            return logits_of(self.model, features)
        return self.head(features)

    @torch.no_grad()
    def verify(self, x: torch.Tensor, bare: bool = False) -> None:
        """Raise ValueError unless head and body (``bare``: without scale or soft cap) are the model, on ``x``."""
        whole = logits(self.model, x)
        features = None
        with contextlib.suppress(RuntimeError):  # something behind the layer may need what it makes
            features = self.features(x)
        if features is None or features.shape != (*whole.shape[:-1], self.head.in_features):
            raise ValueError(f"{self.name!r} is not what makes the logits of {type(self.model).__name__}")
        head = self.head if bare else self.logits
        together = head(features).to(whole.dtype)
        # The same products of the same shapes: only the last digit of this dtype may differ.
        rounding = torch.finfo(whole.dtype).eps * whole.abs()
        if together.shape != whole.shape or ((together - whole).abs() > rounding).any():
            raise ValueError(f"{type(self.model).__name__} does more to its logits than its last layer, {self.name!r}")


def untrained(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy whose weights are drawn anew, as if nothing had been pre-trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(whole_number("seed", seed, 0, 2**64 - 1))
        model = plain(model)
        if isinstance(model, PreTrainedModel):
            fresh: Any = type(model)(copy.deepcopy(model.config))  # transformers' annotation of to() lacks self
            return fresh.to(model.dtype).train(model.training)
        fresh = copy.deepcopy(model)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        return fresh


def pretrained(name: str) -> nn.Module:
    """A network that comes with the package, trained on public data, in evaluation mode.

    Parameters
    ----------
    name
        ``"words"``: a :class:`WordLSTM` over :func:`vocabulary`, of public text. ``"digits"``: a :class:`MobileNet`,
        of the writers 0 to 6 of ``corpora.digits()``.
    """
    one_of("name", name, ("words", "digits"))
    model = WordLSTM() if name == "words" else MobileNet()
    weights = load_file(catalog.data_path("autonomy", f"{name}.safetensors"))
    for key, tensor in weights.items():
        if tensor.is_floating_point():  # the file has 16 bits
            weights[key] = tensor.float()
    model.load_state_dict(weights)
    return model.eval()


def vocabulary() -> Vocabulary:
    """The 10,000 words that the pre-trained word predictor knows."""
    text = catalog.data_path("autonomy", "words.txt").read_text(encoding="utf-8")
    return Vocabulary(text.split("\n")[:-1])  # a line each
