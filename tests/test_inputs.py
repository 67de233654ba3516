import numpy as np
import pytest
import torch
from transformers import BatchEncoding, BatchFeature

from plpkg.inputs import ids_and_labels, one_text, token_ids

ROW, ROWS = torch.tensor([3, 1, 2]), torch.tensor([[3, 1, 2], [4, 5, 6]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
FORMS = [ROW, ROW[None], [3, 1, 2], (3, 1, 2), [[3, 1, 2]], np.array([3, 1, 2]), ROW.to(torch.uint8)]
FORMS += [BatchEncoding({"input_ids": [3, 1, 2], "attention_mask": [1, 1, 1]}), {"input_ids": ROW[None]}]
FORMS += [{"input_ids": [3, 1, 2], "token_type_ids": [0, 0, 0], "offset_mapping": [(0, 1)] * 3, "pixel_values": None}]


@pytest.mark.parametrize("form", FORMS)
def test_one_text_in_any_form(form):
    ids = token_ids(form)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, ROW[None])
    assert one_text(form) == [3, 1, 2]


@pytest.mark.parametrize(
    "batch",
    [
        ROWS,
        (ROWS, [[3, 1, 2], [4, -100, -100]]),
        [ROWS, ROWS],
        {"input_ids": ROWS, "attention_mask": None},
        {"input_ids": ROWS, "attention_mask": MASK.bool()},
        {"input_ids": ROWS.tolist(), "attention_mask": MASK.tolist(), "labels": [[3, 1, 2], [4, -100, -100]]},
    ],
)
def test_padding_is_no_label(batch):
    ids, labels = ids_and_labels(batch)
    assert torch.equal(ids, ROWS)
    padded = isinstance(batch, tuple) or (isinstance(batch, dict) and batch["attention_mask"] is not None)
    assert torch.equal(labels, ROWS.masked_fill(MASK == 0, -100) if padded else ROWS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_ids("text"), "input_ids must be token ids, .* got 'text'"),
        (lambda: token_ids(["a"]), "got .'a'."),
        (lambda: token_ids(None), "got None"),
        (lambda: token_ids([0.5]), "float32"),
        (lambda: token_ids([True]), "bool"),
        (lambda: token_ids([]), r"got \(0,\)"),
        (lambda: token_ids(ROWS[None], "ids"), r"^ids must be .* got \(1, 2, 3\)"),
        (lambda: token_ids({"input_ids": ROWS, "attention_mask": MASK}), "2 tokens of input_ids are padding"),
        (lambda: token_ids({"input_ids": ROWS, "attention_mask": MASK[:1]}), r"mask is \(1, 3\), input_ids \(2, 3\)"),
        (lambda: token_ids(BatchFeature({"input_ids": ROWS, "pixel_values": ROWS})), "come with 'pixel_values'"),
        (lambda: token_ids({"input_ids": ROWS, "position_ids": ROWS}), "come with 'position_ids', which is not read"),
        (lambda: token_ids({"input_ids": ROWS, "token_type_ids": MASK}), "come with 'token_type_ids'"),
        (lambda: one_text({"inputs_embeds": ROWS, "input_ids": ROW}), "come with 'inputs_embeds'"),
        (lambda: token_ids({"input_ids": ROWS, "cross_attention_mask": MASK}), "come with 'cross_attention_mask'"),
        (lambda: one_text(ROWS), r"one text's ids, .* got \(2, 3\)"),
        (lambda: ids_and_labels({"input_ids": ROWS, "attention_mask": MASK.flip(1)}), "0 before 1"),
        (lambda: ids_and_labels({"input_ids": ROWS, "attention_mask": MASK[:1]}), r"mask of shape \(1, 3\)"),
        (lambda: ids_and_labels({"input_ids": ROWS, "attention_mask": MASK, "labels": ROWS}), "where its padding is"),
        (lambda: ids_and_labels((ROWS, ROW)), r"labels of shape \(1, 3\) for ids of \(2, 3\)"),
        (lambda: ids_and_labels((ROWS, ROWS, ROWS), "the batch of 'x'"), "the batch of 'x' must be .* got 3 things"),
        (lambda: ids_and_labels({"labels": ROWS}), "input_ids of a batch must be .* got None"),
    ],
)
def test_what_is_none_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()
