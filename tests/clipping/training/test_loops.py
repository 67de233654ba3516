"""The loops that people bring from elsewhere: other losses, scalers, schedules, schedulers, budgets, a Trainer."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.training.accounting import epsilon_of

from rounding import assert_close, relative

C, COUNT = 0.5, 12
TERMS = 4096  # of a gradient through two layers, every sum in it shorter than this


def flat(gradients):
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 6, generator=generator).to(dtype)
    return TensorDataset(x, torch.randint(0, 4, (COUNT,), generator=generator))


def private(model=None, dataset=None, criterion=nn.CrossEntropyLoss, *, batch_size=COUNT, lr=0.0, **options):
    model = model or net()
    loader = DataLoader(dataset or data(), batch_size=batch_size)
    options = dict(noise_multiplier=0.0, max_grad_norm=C, seed=0) | options
    criterion = criterion() if isinstance(criterion, type) else criterion
    return make_private(model, torch.optim.SGD(model.parameters(), lr=lr), loader, criterion, **options)


def sampled_alone(model, criterion=None, **options):
    """Without a data loader."""
    options = dict(noise_multiplier=0.0, max_grad_norm=C, sample_rate=0.5, expected_batch_size=1.0) | options
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), None, criterion, **options)


def step(made, x, y):
    made.optimizer.zero_grad()
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()


def train(made, steps):
    while made.steps < steps:
        for x, y in made.data_loader:
            step(made, x, y)
            if made.steps == steps:
                break


def released(made, loss):
    """What the optimizer gets in a step."""
    loss.backward()
    made.optimizer.step()
    return flat(p.grad for p in made.model.parameters() if p.requires_grad)


def clipped(model, losses):
    """The clipped sum of one loss an example, each of a forward pass of its own, by autograd alone."""
    learning, total = [p for p in model.parameters() if p.requires_grad], 0
    for loss in losses:
        gradient = flat(torch.autograd.grad(loss, learning, materialize_grads=True))
        total = total + gradient * min(1.0, C / max(gradient.norm().item(), 1e-30))
    return total


# The own loss of a Hugging Face model


def llama():
    sizes = dict(hidden=32, intermediate=48, vocab=64, max_positions=32, num_heads=4, num_kv_heads=2)
    return random_backbone("llama", dtype=torch.float64, **sizes).train()


def lora():
    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear")).double().train()


def bert():
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, num_labels=3)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    config = BertConfig(**sizes, **still, vocab_size=64, max_position_embeddings=16)
    return BertForSequenceClassification(config).double().train()


def texts():
    """The last has no labels at all, and of one only the first, which is nobody's next token."""
    ids = torch.randint(0, 64, (5, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :6] = labels[1, 4:] = labels[3, 1:] = labels[4] = -100
    return {"input_ids": ids, "labels": labels}


CLASSES = texts() | {"labels": torch.tensor([0, 2, 1, 1, 0])}


@pytest.mark.parametrize(("make", "batch"), [(llama, texts()), (lora, texts()), (bert, CLASSES)])
@pytest.mark.parametrize("execution", ["book_keeping", "ghost"])
def test_the_loss_of_a_model_with_labels(make, batch, execution):
    plain = make()
    outputs = [plain(**{key: value[i : i + 1] for key, value in batch.items()}) for i in range(5)]
    losses = [output.loss if make is bert or i < 3 else 0 * output.logits.sum() for i, output in enumerate(outputs)]
    made = sampled_alone(make(), execution=execution)
    model, *_ = made
    output = model(**batch)
    assert_close(released(made, output.loss), clipped(plain, losses), TERMS)
    assert output.loss.item() == pytest.approx(sum(loss.item() for loss in losses) / 5, rel=relative(TERMS))
    assert output[0] is output.loss
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(plain(**batch).loss.item(), rel=relative(TERMS))


def with_another_loss():
    model = llama()
    forward = model.forward

    def other(**inputs):
        output = forward(**inputs)
        output["loss"] = output.loss + 1
        return output

    model.forward, model.loss_function = other, lambda logits, labels, **_: logits.square().mean()
    return model


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (net, {}, "criterion=None takes the model's own loss, and Sequential has none"),
        (llama, {"input_ids": texts()["input_ids"]}, "call the model with labels=…, by name"),
        (with_another_loss, texts(), "the loss of LlamaForCausalLM for one example is .*: give a criterion"),
    ],
)
def test_a_loss_that_is_not_of_logits_and_labels(make, inputs, message):
    with pytest.raises(ValueError, match=message):
        sampled_alone(make()).model(**inputs)


def experts(coefficient):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    more = dict(intermediate_size=24, num_local_experts=3, num_experts_per_tok=2, experts_implementation="batched_mm")
    config = MixtralConfig(**sizes, **more, output_router_logits=True, router_aux_loss_coef=coefficient)
    return MixtralForCausalLM(config).double().train()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes expert by expert
@pytest.mark.parametrize("coefficient", [1e-6, 0.001, 0.5])
def test_a_small_term_beside_the_logits_is_kept_or_refused(coefficient):
    """A router's loss is of the whole batch; of one example it is that example's."""
    batch = {name: rows[:1] for name, rows in texts().items()}
    plain, made = experts(coefficient), sampled_alone(experts(coefficient))
    assert_close(released(made, made.model(**batch).loss), clipped(plain, [plain(**batch).loss]), TERMS)
    with pytest.raises(
        ValueError, match=r"a term that does not come from logits and labels .*max_physical_batch_size=1"
    ):
        made.model(**texts())


# Losses of three arguments and more


def triplet(model, x):
    return nn.TripletMarginLoss, tuple(model(part) for part in (x, x.flip(1), x + 1))


def cosine(model, x):
    return nn.CosineEmbeddingLoss, (model(x), model(x.flip(1)), torch.tensor([1.0, -1.0] * 3).to(x))


def nll(model, x):
    return nn.GaussianNLLLoss, (model(x), x[:, :4], model(x + 1).exp())


def ctc(model, x):
    steps = torch.stack([x, x.flip(1), x + 1, x - 1], 1)  # (batch, time, 6)
    scores = model(steps).log_softmax(2).transpose(0, 1)
    targets = torch.tensor([[1, 2], [3, 1], [2, 1], [3, 3], [1, 3], [2, 2]])
    return nn.CTCLoss, (scores, targets, torch.full((6,), 4), torch.tensor([1, 2, 2, 1, 2, 1]))


@pytest.mark.parametrize("of", [triplet, cosine, nll, ctc])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_several_arguments(of, reduction):
    x, plain = data()[:6][0], net()
    kind, _ = of(plain, x)
    criterion = kind(reduction=reduction)

    def alone(i):
        _, arguments = of(plain, x)
        return criterion(*(a[:, i : i + 1] if kind is nn.CTCLoss and a.ndim == 3 else a[i : i + 1] for a in arguments))

    made = sampled_alone(net(), criterion)
    got = released(made, made.criterion(*of(made.model, x)[1]))
    assert_close(got, clipped(plain, map(alone, range(6))), TERMS)
    with torch.no_grad():
        _, arguments = of(plain, x)
        assert torch.equal(made.criterion(*arguments), kind(reduction=reduction)(*arguments))


# GradScaler


def scaled(dtype, scale, *, tiny=1.0):
    """What a step gives under autocast, with a GradScaler or without."""

    def loss(output, y):
        return tiny * functional.cross_entropy(output.float(), y, reduction="none")

    made = private(net(torch.float32), data(torch.float32), loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for x, y in made.data_loader:
        made.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = made.criterion(made.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(made.optimizer)
        scaler.update()
    assert made.steps == 1
    return flat(p.grad for p in made.model.parameters())


def test_a_scaler_changes_nothing_in_float32():
    assert torch.equal(scaled(torch.float32, 2.0**10), scaled(torch.float32, None))


def assert_in_half_precision(got, expected):
    """A gradient of an output is rounded once, and in two layers each once more."""
    assert (got - expected).norm() < 16 * torch.finfo(torch.float16).eps * expected.norm()


def test_a_scaler_saves_gradients_from_underflow_in_half_precision():
    expected = scaled(torch.float16, None, tiny=2.0**-6) * 2.0**-16  # far from underflow, and below C
    lost, saved = (scaled(torch.float16, scale, tiny=2.0**-22) for scale in (None, 2.0**14))
    assert (lost - expected).norm() > 0.1 * expected.norm()
    assert_in_half_precision(saved, expected)


def test_what_overflows_goes_back_with_less_and_no_step_is_skipped():
    assert_in_half_precision(scaled(torch.float16, 2.0**24), scaled(torch.float16, 2.0**8))


def test_a_loss_that_is_not_finite_stays_an_error_with_a_scaler():
    made = private(criterion=lambda output, y: functional.cross_entropy(output, y, reduction="none").log() * math.inf)
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(made.data_loader))
    with pytest.raises(FloatingPointError, match="the gradient of example 0 of"):
        scaler.scale(made.criterion(made.model(x), y)).backward()


def test_a_private_loss_is_a_number_to_show_and_not_to_calculate_with():
    made = private()
    x, y = next(iter(made.data_loader))
    loss, expected = made.criterion(made.model(x), y), functional.cross_entropy(net()(x), y).item()
    assert [loss.item(), float(loss), loss.detach().item()] == pytest.approx([expected] * 3)
    assert f"{loss:.3f}" == f"{expected:.3f}"
    assert type(loss.detach()) is torch.Tensor
    assert not loss.requires_grad
    for refused in (lambda: loss * 2, lambda: 0.1 * loss, lambda: loss / 4, lambda: loss + 1, lambda: -loss):
        with pytest.raises(TypeError, match="a private loss goes backward as it is"):
            refused()


# Shuffled batches


def shuffled(**options):
    return private(**dict(batch_size=5, poisson_sampling=False, noise_multiplier=1.0) | options)


def rows(made):
    return [tuple(row.tolist()) for x, _ in made.data_loader for row in x]


EVERYBODY = sorted(tuple(row.tolist()) for row in data()[:][0])


def test_shuffled_batches_have_each_example_once_in_an_epoch():
    made = shuffled()
    first, second = rows(made), rows(made)
    assert sorted(first) == sorted(second) == EVERYBODY
    assert first != second
    assert made.expected_batch_size == 5


def test_shuffled_users_and_pieces():
    made = shuffled(batch_size=4, users=[i % 4 for i in range(COUNT)], max_physical_batch_size=2)
    assert sorted(rows(made)) == EVERYBODY
    assert made.expected_batch_size == 2  # of four users in three steps


def test_an_order_survives_the_process():
    made, resumed, again = (shuffled(seed=None) for _ in range(3))
    train(made, 1)
    for other in (resumed, again):
        other.load_state_dict(made.state_dict())
    rest = rows(resumed)  # of the epoch
    assert len(rest) == COUNT - 5
    assert rows(again) == rest


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_the_epsilon_of_shuffled_batches_counts_epochs_without_sampling(accountant):
    made = shuffled(noise_multiplier=2.0, accountant=accountant)
    for steps, epochs in ((1, 1), (3, 1), (4, 2), (7, 3)):
        train(made, steps)
        expected = epsilon_of(2.0, 1.0, epochs, 1e-5, accountant=accountant)
        assert made.epsilon(1e-5) == pytest.approx(expected, rel=relative(64))
    assert made.epsilon(1e-5) > epsilon_of(2.0, 1 / 3, 7, 1e-5, accountant=accountant)


def test_the_noise_for_an_epsilon_of_shuffled_batches():
    made = shuffled(noise_multiplier=None, target_epsilon=3.0, target_delta=1e-5, epochs=2)
    assert 2.98 < epsilon_of(made.noise_multiplier, 1.0, 2, 1e-5) <= 3.0


# Schedules of noise and C, one C a layer


def test_schedules_of_noise_and_of_c():
    sigmas, norms = [3.0, 2.0, 1.0], [0.1, 0.2, 0.4]
    made = private(batch_size=4, noise_multiplier=sigmas.__getitem__, max_grad_norm=norms.__getitem__)
    seen = []
    made.randomness.add_noise = lambda sums, std, draw: seen.append((std, flat(sums.values()).norm().item()))
    train(made, 3)
    for (std, size), sigma, norm in zip(seen, sigmas, norms, strict=True):
        assert std == pytest.approx(sigma * norm)
        assert 0 < size <= COUNT * norm * (1 + relative(TERMS))
    assert made.accountant.history == [(sigma, 1 / 3, 1) for sigma in sigmas]


def test_a_schedule_is_resumed_where_it_was():
    def begun(scale=1.0):
        return private(batch_size=4, noise_multiplier=lambda step: scale / (1 + step))

    made, resumed = begun(), begun()
    train(made, 2)
    resumed.load_state_dict(made.state_dict())
    assert resumed.noise_multiplier == made.noise_multiplier == 1 / 3
    with pytest.raises(ValueError, match=r"noise_multiplier=0\.33.*, now 0\.66"):
        begun(2.0).load_state_dict(made.state_dict())


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_one_c_for_each_layer(execution):
    model, limits = net(), [0.01, 0.2]
    x, y = data()[:]

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    gradients, _ = clipped_gradients(model, loss, (x, y), limits, execution, clipping="per_layer")
    expected = [0, 0]
    for i in range(COUNT):
        parts = torch.autograd.grad(loss(model, (x[i : i + 1], y[i : i + 1])).sum(), list(model.parameters()))
        for layer, limit in enumerate(limits):
            part = flat(parts[2 * layer : 2 * layer + 2])
            expected[layer] = expected[layer] + part * min(1.0, limit / part.norm().item())
    assert_close(flat(gradients[name] for name, _ in model.named_parameters()), torch.cat(expected), TERMS)


def test_the_noise_of_one_c_for_each_layer():
    made = private(max_grad_norm=[0.3, 0.4], clipping="per_layer", noise_multiplier=2.0)
    assert made.layers == ["0", "2"]
    assert made.mechanism.clip.sensitivity == pytest.approx(0.5)


REFUSED = [
    (dict(noise_multiplier=lambda step: -1.0), "noise_multiplier must be at least 0, got -1.0"),
    (dict(noise_multiplier=lambda step: None), "noise_multiplier must be at least 0, got None"),
    (dict(max_grad_norm=lambda step: -1.0), "max_grad_norm must be greater than 0, got -1.0"),
    (dict(max_grad_norm=lambda step: None), "max_grad_norm must be greater than 0, got None"),
    (dict(max_grad_norm=[1.0, 1.0, 1.0], clipping="per_layer"), "max_grad_norm has 3 norms for 2 layers: 0, 2"),
    (dict(max_grad_norm=[1.0, 1.0]), r"max_grad_norm=\[1\.0, 1\.0\]: one for each layer needs clipping='per_layer'"),
    (dict(poisson_sampling=False, noise_multiplier=lambda step: 1.0),
     "poisson_sampling=False takes one noise_multiplier for all steps"),
    (dict(max_epsilon=1.0), r"max_epsilon=1\.0 needs a target_delta"),
    (dict(max_epsilon=0.1, target_delta=1e-5, noise_multiplier=0.5), "less than the first step spends"),
    (dict(max_epsilon=0.0, target_delta=1e-5), "max_epsilon must be greater than 0"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_schedules_norms_and_budgets_that_make_no_sense(options, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        private(model, **dict(noise_multiplier=1.0) | options)
    private(model)  # nothing is left on the model


# Schedulers of the learning rate, and a stop


def test_a_scheduler_goes_as_far_as_the_training():
    made = private(batch_size=2, max_physical_batch_size=1, lr=1.0, max_grad_norm=1e-3)
    scheduler = made.paced(torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.5))
    pieces = 0
    for x, y in made.data_loader:
        step(made, x, y)
        scheduler.step()
        pieces += 1
    assert made.steps == 6 < pieces
    assert scheduler.get_last_lr() == [pytest.approx(0.5**6)]
    assert scheduler.state_dict()["last_epoch"] == 6


def test_the_loop_ends_where_the_budget_does():
    made = private(batch_size=4, noise_multiplier=1.0, max_epsilon=5.0, target_delta=1e-5)
    while not made.done:
        for x, y in made.data_loader:
            step(made, x, y)
    assert made.epsilon(1e-5) <= 5.0 < epsilon_of(1.0, 1 / 3, made.steps + 1, 1e-5)
    assert list(made.data_loader) == []


def test_a_step_beyond_the_budget_is_refused():
    made = sampled_alone(net(), nn.MSELoss(), noise_multiplier=1.0, max_epsilon=4.0, target_delta=1e-5)
    while not made.done:
        made.skip()
    with pytest.raises(RuntimeError, match=f"a step beyond the {made.steps} that max_epsilon allows"):
        made.skip()
    assert made.epsilon(1e-5) <= 4.0


# transformers.Trainer, as the docstring of make.py says


class PrivateTrainer(Trainer):
    def __init__(self, private, **options):
        scheduler = torch.optim.lr_scheduler.ConstantLR(private.optimizer, factor=1.0)
        super().__init__(private.model, optimizers=(private.optimizer, private.paced(scheduler)), **options)
        self.private = private

    def get_train_dataloader(self):
        return self.private.data_loader


def test_a_trainer_is_the_loop(tmp_path):
    batch = texts()
    dataset = [{key: value[i % 3] for key, value in batch.items()} for i in range(8)]
    by_hand, made = (private(llama(), dataset, None, batch_size=4, lr=0.1, noise_multiplier=1.0) for _ in range(2))
    for inputs in by_hand.data_loader:
        by_hand.optimizer.zero_grad()
        by_hand.model(**inputs).loss.backward()
        by_hand.optimizer.step()
    quiet = dict(report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no")
    arguments = TrainingArguments(str(tmp_path), num_train_epochs=1, max_grad_norm=0, use_cpu=True, **quiet)
    PrivateTrainer(made, args=arguments).train()
    assert made.steps == by_hand.steps == 2
    assert made.epsilon(1e-5) == by_hand.epsilon(1e-5)
    assert_close(flat(made.model.parameters()), flat(by_hand.model.parameters()), TERMS)
    assert made.accountant.history == by_hand.accountant.history
