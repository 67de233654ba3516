"""A model of one's own with a PrivateLoRA adapter or a ladder: a new one, or one that was saved."""

from pathlib import Path

from peft import PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase

from plpkg.backbones import load_backbone
from plpkg.residual.config import PRIVATE_LORA
from plpkg.residual.methods import LadderConfig, PrivateLoraConfig, load, saved_config
from plpkg.residual.wire.tensors import PRECISIONS
from plpkg.validation import one_of, whole_number


def adapted_model(
    name: str,
    adapter: Path | None,
    dtype: str,
    device: str,
    *,
    rank: int | None = None,
    ladder: bool = False,
    like: Path | None = None,
    targets: list[str] | None = None,
    seed: int | None = None,
    **config,
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """A model with an adapter of this room, and its tokenizer.

    Parameters
    ----------
    name
        As for :func:`plpkg.backbones.load_backbone`.
    adapter
        A folder that ``save_pretrained`` wrote, with safetensors; without one a new adapter.
    dtype, device
        Of the model: one of the wire's precisions or ``"auto"``, the checkpoint's own; and ``"cpu"`` or ``"cuda"``.
    rank, ladder, targets, seed
        Of a new adapter: its rank, both ways, 64 by default; whether it is a ladder (a saved one then has to be); the
        layers that it adapts; the seed of A and B. What is saved may not be another.
    **config
        More fields of a new adapter's configuration.
    like
        A folder with a saved adapter whose configuration the new one has instead. Nothing else is read of it: no M.

    Raises
    ------
    ValueError, FileNotFoundError
        No such model, device or adapter; an adapter that is damaged, of another kind, no ladder where one was asked
        for, or for another model.
    """
    dtypes = PRECISIONS | {"auto": "auto"}
    model, tokenizer = load_backbone(name, dtype=dtypes[one_of("dtype", dtype, tuple(dtypes))], device=device)
    asked = {"--rank": rank, "--target": targets and sorted(targets), "--seed": seed}
    if like is not None:
        alike = _public_config(like, adapter, ladder, asked)
        return get_peft_model(model, alike), tokenizer
    if adapter is None:
        rank = 64 if rank is None else whole_number("--rank", rank, 1)
        config |= dict(target_modules=targets or None, projection_seed=seed or 0)
        ranks = dict(r=rank) if ladder else dict(r_c2d=rank, r_d2c=rank)
        method = LadderConfig if ladder else PrivateLoraConfig
        return get_peft_model(model, method(**ranks, **config)), tokenizer
    _config(adapter, ladder, asked)
    try:
        return load(model, adapter, trainable=True), tokenizer
    except ValueError as error:
        raise ValueError(f"{adapter} does not fit {name}: {error}") from error


def _public_config(like: Path, adapter: Path | None, ladder: bool, asked: dict) -> PrivateLoraConfig | LadderConfig:
    """The configuration of a new adapter with the A and B of one that was saved."""
    if adapter is not None:
        raise ValueError(f"--like {like} and --adapter {adapter}: take one of them")
    config = _config(like, ladder, asked)
    if config.init == "given":
        raise ValueError(
            f"{like} has an A and a B that its configuration does not tell (init='given'): --adapter reads them, and M"
        )
    config.base_model_name_or_path = None
    config.inference_mode = False
    return config


def _config(adapter: Path, ladder: bool, asked: dict) -> PrivateLoraConfig | LadderConfig:
    """The configuration in a folder: of a ladder if one was asked for, and no other than was asked."""
    config = saved_config(adapter)
    if ladder and not isinstance(config, LadderConfig):
        raise ValueError(
            f"{adapter} holds a {PRIVATE_LORA.value} adapter, but a ladder was asked for: leave --ladder out"
        )
    ranks = sorted({config.r} if isinstance(config, LadderConfig) else {config.r_c2d, config.r_d2c})
    says = {
        "--rank": ranks[0] if len(ranks) == 1 else ranks,  # no one number says two
        "--target": sorted(config.target_modules or []),
        "--seed": config.projection_seed,
    }
    for option, value in asked.items():
        if value is not None and value != says[option]:
            said = says[option]
            raise ValueError(f"{adapter} holds an adapter with {option} {said}, got {option} {value}: leave it out")
    return config
