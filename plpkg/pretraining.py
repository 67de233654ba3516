"""Training a small language model from nothing on the public text: what ``plpkg pretrain`` runs.

A Llama-architecture decoder and a byte-level BPE tokenizer. Hidden matrices learn by Muon (Jordan 2024:
orthogonalised momentum), embeddings and norms by AdamW, both at a rate that warms up and then falls
linearly to zero. The batch of a step depends on the seed and the step alone, and everything that a step
needs is in one checkpoint file: a run that was killed ends with the same weights as one that was not, if it
goes on with the same versions, device, number of threads and of processes, and micro-batch.

Several processes (``accelerate launch`` on GPUs, ``python -m torch.distributed.run`` on a CPU) share each batch
between them. Left out: dropout, which a few epochs do not need, and anything that only pays for large models.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

import torch

from plpkg import corpora, training_loop
from plpkg.corpora import Document, Writer
from plpkg.corpora.documents import several
from plpkg.files import checkpoints
from plpkg.scoring import Score, score
from plpkg.validation import number, one_of, whole_number

END_OF_TEXT = "<|endoftext|>"
LOGGED = ("step", "tokens", "learning_rate", "loss", "validation_bits_per_byte", "seconds")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights; the default is the recipe that made ``plpkg-small``.

    Attributes
    ----------
    num_layers, hidden, num_heads, num_kv_heads, intermediate, vocab, max_positions
        Hugging Face's dimensions. The word embedding is also the LM head.
    seq, batch
        Tokens in a window, and windows in a step, those of all processes together.
    steps
        The number of updates.
    lr
        The highest learning rate, of both optimizers: Muon's updates are scaled to AdamW's size.
    warmup
        The steps in which it rises, but at most a tenth of all.
    weight_decay
        The decay of the hidden matrices.
    seed
        The seed of weights and order.
    """

    num_layers: int = 5
    hidden: int = 320
    num_heads: int = 10
    num_kv_heads: int = 2
    intermediate: int = 832
    vocab: int = 8192
    max_positions: int = 1024
    seq: int = 512
    batch: int = 16
    steps: int = 1700
    lr: float = 8e-3
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):  # NumPy's and torch's numbers as Python's: they go into files
            with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
                value = getattr(self, field.name).item()
                object.__setattr__(self, field.name, value)
        for name in ("num_layers", "hidden", "num_heads", "intermediate", "batch", "steps"):
            whole_number(name, getattr(self, name), 1)
        whole_number("num_kv_heads", self.num_kv_heads, 1, self.num_heads, "num_heads")
        whole_number("vocab", self.vocab, 257)
        whole_number("max_positions", self.max_positions, 2)
        whole_number("seq", self.seq, 2, self.max_positions, "max_positions")
        whole_number("seed", self.seed, 0, 2**64 - 1)
        whole_number("warmup", self.warmup, 0)
        number("lr", self.lr, open_low=True)
        number("weight_decay", self.weight_decay)
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden={self.hidden} must be a multiple of num_heads={self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        head_width = self.hidden // self.num_heads
        if head_width % 2:
            raise ValueError(f"rotary positions need heads of even width, got {head_width}")

    @classmethod
    def changed(cls, changes: Sequence[str]) -> "Recipe":
        """The default recipe with changes such as ``"steps=100"``.

        Raises
        ------
        ValueError
            No such field, or a value that it cannot have.
        """
        known = tuple(field.name for field in fields(cls))
        values = {}
        for change in changes:
            name, _, text = change.partition("=")
            one_of("the field to set", name, known)
            kind = type(getattr(cls, name))  # of the default
            try:
                values[name] = kind(text)
            except ValueError:
                raise ValueError(f"{name} must be a number, got {text!r}") from None
        return cls(**values)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step: up to ``lr`` in ``warmup`` steps, then linearly down to zero."""
        warmup = min(self.warmup, self.steps // 10)
        return self.lr * training_loop.rising_and_falling(step, warmup, self.steps)


def train_tokenizer(documents: Sequence[Document], vocab: int):
    """A byte-level BPE tokenizer (any text can be written with it), learnt from documents.

    Parameters
    ----------
    documents
        Training text.
    vocab
        Its tokens, with the 256 bytes and the end of text, which is number 0.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def build(recipe: Recipe):
    """The untrained model of a recipe: a ``transformers.LlamaForCausalLM`` in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=recipe.num_layers,
        hidden_size=recipe.hidden,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        intermediate_size=recipe.intermediate,
        vocab_size=recipe.vocab,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def optimizers(model, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for the rest."""
    hidden = []
    rest = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            hidden.append(parameter)
        else:
            rest.append(parameter)
    return [
        torch.optim.Muon(hidden, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def pretrain(
    recipe: Recipe,
    out: str | Path,
    *,
    train: Sequence[Document] | None = None,
    validation: Sequence[Document] | None = None,
    device: str | None = None,
    bf16: bool = True,
    micro_batch: int = 16,
    checkpoint_every: int = 50,
    evaluate_every: int = 200,
    progress: bool = True,
) -> Path:
    """Train, or go on where the last run into the same folder stopped.

    Parameters
    ----------
    recipe
        The model to train.
    out
        A folder. It gets ``checkpoint.safetensors`` (which stays), ``training.csv`` (the log), and at the end the model
        (bfloat16 safetensors) and the tokenizer as ``save_pretrained`` writes them, and last ``recipe.json``.
    train, validation
        Documents; the public text by default.
    device
        ``"cpu"`` or ``"cuda"``; what accelerate finds by default.
    bf16
        Compute in bfloat16; weights and the optimizers' states stay float32 (Muon orthogonalises in bfloat16).
    micro_batch
        Windows that a process has in memory at a time.
    checkpoint_every, evaluate_every
        Steps from one to the next.
    progress
        Show a bar.

    Returns
    -------
    pathlib.Path
        ``out``.

    Raises
    ------
    ValueError
        The folder holds a run of another recipe or text, or a checkpoint that cannot be read; the
        processes do not divide the batch; or there is nothing to learn or to score.
    FloatingPointError
        The loss is not finite any more. The last checkpoint is from before.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder")
    whole_number("checkpoint_every", checkpoint_every, 1)
    whole_number("evaluate_every", evaluate_every, 1)
    if device is not None:
        one_of("device", device, ("cpu", "cuda"))
    accelerator = training_loop.accelerator(cpu=device == "cpu")
    autocast = torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16)
    if device == "cuda" and accelerator.device.type != "cuda":
        raise ValueError("device='cuda', but torch sees no CUDA device")
    if recipe.batch % accelerator.num_processes:
        raise ValueError(f"batch={recipe.batch} must be a multiple of the processes={accelerator.num_processes}")
    share = recipe.batch // accelerator.num_processes
    micro_batch = min(whole_number("micro_batch", micro_batch, 1), share)

    train = corpora.public("train") if train is None else list(several(train))
    validation = corpora.public("validation") if validation is None else list(several(validation))
    text = Writer("text", {"train": tuple(train), "validation": tuple(validation)})
    identity = asdict(recipe) | {"bf16": bf16} | {split: text.fingerprint(split) for split in text.documents}
    main = accelerator.is_main_process
    run = training_loop.TrainingRun(recipe.steps, out, identity, checkpoint_every=checkpoint_every, writes=main)
    tokenizer = train_tokenizer(train, recipe.vocab)
    if len(tokenizer) != recipe.vocab:
        raise ValueError(f"the text yields only {len(tokenizer)} tokens, not vocab={recipe.vocab}")
    encoded = corpora.encode(train, tokenizer)
    held_out = corpora.encode(validation, tokenizer)
    Score.of(held_out, 0.0)  # nothing to score is said now, not at the first evaluation
    stream = corpora.batches(encoded, batch=recipe.batch, seq=recipe.seq, seed=recipe.seed, start=run.done)

    raw = build(recipe)
    model, *opts = accelerator.prepare(raw, *optimizers(raw, recipe))
    run.begin("pretraining", progress, model=raw, **{f"optimizer {i}": each for i, each in enumerate(opts)})
    run.facts["processes"] = accelerator.num_processes
    out.mkdir(parents=True, exist_ok=True)

    def gradient(step: int) -> float:
        windows = next(stream)  # of all processes
        own = windows[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
        return _gradient(accelerator, autocast, model, own, micro_batch)

    model.train()
    remedy = ", or its gradient: take another folder and a lower lr"
    for done, loss in run.learn(gradient, opts, recipe.lr_at, remedy=remedy):
        if main and (done % evaluate_every == 0 or done == recipe.steps):
            with autocast:
                judged = score(raw, tokenizer, held_out, seq=recipe.seq, stride=recipe.seq)
            row = {
                "step": done,
                "tokens": done * recipe.batch * recipe.seq,
                "learning_rate": recipe.lr_at(done - 1),
                "loss": loss,
                "validation_bits_per_byte": judged.bits_per_byte,
                "seconds": run.seconds,
            }
            run.log.append(row)
            _save_log(out, run.log)
            run.bar.set_postfix(bits_per_byte=f"{judged.bits_per_byte:.3f}")
    if main:
        _save_log(out, run.log)
        raw.to(torch.bfloat16)  # pyright: ignore[reportArgumentType] (transformers' wrapper hides `to`)

        def write(folder: str) -> None:
            raw.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        checkpoints.replace_files(out, write)
        made = {
            "device": accelerator.device.type,
            "threads": torch.get_num_threads(),
            "processes": accelerator.num_processes,
            "micro_batch": micro_batch,
            "versions": corpora.versions() | {"tokenizers": version("tokenizers")},
        }
        facts = json.dumps(identity | {"run": made}, indent=2) + "\n"
        checkpoints.replace_file(out / "recipe.json", lambda path: path.write_text(facts, encoding="utf-8"))
    accelerator.wait_for_everyone()
    return out


def _gradient(accelerator, autocast, model, ids: torch.Tensor, micro_batch: int) -> float:
    """The gradient of this process's windows ``(windows, seq)``, clipped; all processes' mean loss, in nats per token.

    If a gradient is not finite, neither is what comes back.
    """
    pieces = ids.split(micro_batch)
    total = 0.0
    for i, piece in enumerate(pieces):
        is_last = i == len(pieces) - 1  # with it the processes exchange their gradients
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            with autocast:
                mean = model(input_ids=piece, labels=piece, use_cache=False).loss
                loss = mean * len(piece) / len(ids)
            accelerator.backward(loss)
        total += loss.detach()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        return norm.item()
    return accelerator.reduce(total, "mean").item()


def _save_log(out: Path, rows: list[dict]) -> None:
    from pandas import DataFrame

    log = DataFrame(rows, columns=LOGGED)
    checkpoints.replace_file(out / "training.csv", lambda path: log.to_csv(path, index=False, lineterminator="\n"))
