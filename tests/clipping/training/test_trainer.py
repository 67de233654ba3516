"""transformers.Trainer with private steps, beside the loop written by hand."""

import functools
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import TrainingArguments, get_linear_schedule_with_warmup

from plpkg.backbones import random_backbone
from plpkg.clipping import PrivateTrainer, make_private

EPOCHS, BATCH, RATE = 3, 4, 1e-2
GUARD = functools.partial(make_private, noise_multiplier=1.0, max_grad_norm=0.5, seed=3)


def llama(dropout=0.0):
    sizes = dict(hidden=32, intermediate=48, vocab=64, max_positions=32, num_heads=4, num_kv_heads=2)
    return random_backbone("llama", **sizes, options=dict(attention_dropout=dropout)).train()


def lora():
    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)).train()


def texts(count=20):
    ids = torch.randint(0, 64, (count, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[::3, 5:] = -100
    return [{"input_ids": row, "labels": wanted} for row, wanted in zip(ids, labels, strict=True)]


def arguments(folder, **options):
    quiet = dict(report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=True)
    return TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=RATE, warmup_steps=3,
        **quiet | options,
    )  # fmt: skip


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def by_hand(model, autocast=False):
    """AdamW and a schedule as the Trainer has them, and the losses that were shown."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 3, EPOCHS * 5)

    def losses(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(batch["input_ids"]).logits[:, :-1]
            nats = torch.nn.functional.cross_entropy(logits.float().mT, batch["labels"][:, 1:], reduction="none")
            return nats.sum(1) / (batch["labels"][:, 1:] != -100).sum(1)

    private = GUARD(model, optimizer, DataLoader(texts(), batch_size=BATCH), losses, epochs=EPOCHS)
    shown = []
    for sample in private:
        found, count = private.step(sample)
        schedule.step()
        shown.append(found.mean().item() if count else 0.0)
    return private, sum(shown) / len(shown)


@pytest.mark.parametrize(
    ("make", "half", "reentrant"),
    [(llama, False, None), (lora, False, True), (lora, False, False), (llama, True, True)],
)
def test_a_trainer_is_the_loop(make, half, reentrant, tmp_path):
    checkpoints = {}
    if reentrant is not None:
        checkpoints = dict(activation_checkpointing=True)
        checkpoints["activation_checkpointing_kwargs"] = dict(use_reentrant=reentrant)
    torch.manual_seed(0)
    model = make()
    if make is lora and reentrant:
        model.enable_input_require_grads()
    trainer = PrivateTrainer(model, arguments(tmp_path, bf16=half, **checkpoints), private=GUARD, train_dataset=texts())
    for each in (twin := make()).modules():
        each.p = 0.0 if isinstance(each, torch.nn.Dropout) else getattr(each, "p", None)
    for each in model.modules():
        each.p = 0.0 if isinstance(each, torch.nn.Dropout) else getattr(each, "p", None)
    result = trainer.train()
    hand, shown = by_hand(twin, half)
    if half:
        exact, _ = by_hand(make())
        assert (flat(model) - flat(exact.model)).abs().max() > 1e-5  # it is computed in bfloat16
    assert trainer.private.steps == hand.steps == 15
    assert trainer.private.epsilon(1e-5) == hand.epsilon(1e-5)
    # float32 rounds by 6e-8, and AdamW's first steps divide by what is that small.
    torch.testing.assert_close(flat(model), flat(twin), rtol=0, atol=1e-6)
    assert result.training_loss == pytest.approx(shown, rel=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())  # nothing is wrapped


def test_a_run_that_resumes_goes_on_bit_for_bit(tmp_path):
    def trained(folder, **options):
        torch.manual_seed(0)
        model = llama(dropout=0.2)
        saving = dict(save_strategy="steps", save_steps=7)
        return PrivateTrainer(model, arguments(folder, **saving), private=GUARD, train_dataset=texts(), **options)

    whole = trained(tmp_path)
    whole.train()
    resumed = trained(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert resumed.private.steps == whole.private.steps == 15
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert resumed.private.epsilon(1e-5) == whole.private.epsilon(1e-5)
    (tmp_path / "checkpoint-7" / "private.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no private\.safetensors: what its weights have released is not known"):
        trained(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))


def test_max_epsilon_ends_it_and_pieces_and_evaluations_go_with_it(tmp_path):
    guard = functools.partial(GUARD, max_epsilon=3.0, target_delta=1e-5, max_physical_batch_size=2)
    options = dict(eval_strategy="steps", eval_steps=2)
    trainer = PrivateTrainer(
        llama(), arguments(tmp_path, **options), private=guard, train_dataset=texts(), eval_dataset=texts(3)
    )
    trainer.train()
    assert trainer.private.done
    assert 0 < trainer.private.steps < 15
    assert trainer.private.epsilon(1e-5) <= 3.0
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row]


def test_a_data_collator_that_pads_and_columns_that_the_model_does_not_take(tmp_path):
    rows = [{key: value[: 4 + i % 5] for key, value in row.items()} | {"text": "x"} for i, row in enumerate(texts())]

    def padded(rows):
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        ids, labels = ([row[key] for row in rows] for key in ("input_ids", "labels"))
        return {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100)}

    trainer = PrivateTrainer(
        llama(), arguments(tmp_path, max_steps=4), private=GUARD, train_dataset=rows, data_collator=padded
    )
    trainer.train()
    assert trainer.private.steps == 4


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (dict(gradient_accumulation_steps=2), {}, "gradient_accumulation_steps=2: .* max_physical_batch_size"),
        (dict(label_smoothing_factor=0.1), {}, r"label_smoothing_factor=0\.1 makes one loss of a batch"),
        ({}, dict(compute_loss_func=max), "compute_loss_func=.* makes one loss of a batch"),
        (dict(save_only_model=True), {}, "save_only_model=True leaves out"),
    ],
)
def test_arguments_without_a_meaning_here(options, more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PrivateTrainer(llama(), arguments(tmp_path, **options), private=GUARD, train_dataset=texts(), **more)


def test_a_trainer_with_losses_of_its_own(tmp_path):
    def losses(model, batch):
        return model(batch["input_ids"]).logits.square().mean((1, 2))

    made = [
        PrivateTrainer(llama(), arguments(tmp_path), private=GUARD, train_dataset=texts(), losses=each)
        for each in (losses, None)
    ]
    for trainer in made:
        trainer.train()
    assert all(one.private.steps == other.private.steps for one, other in itertools.pairwise(made))
    assert not torch.equal(*(flat(trainer.model) for trainer in made))


def test_a_training_without_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a train_dataset"):
        PrivateTrainer(llama(), arguments(tmp_path), private=GUARD).train()
