"""How many tokens must pass before the cloud's copy of M answers as its owner does, on SmolLM2-135M-Instruct.

The cloud hears the first tokens of a page of the diary, rounded to 16 bits, and takes the matrix of least norm that
explains them, for each of the 210 M of rank 64. Then the 40 facts that M has learnt are asked of the copy, greedily, in
a chat.

* ``right``: facts answered, by ``plpkg.questions.right``. ``error``: of the middle copy, relative to M (Frobenius).
  ``shown``: of the middle place, the share of the questions' u, squared, in directions that the heard tokens span.

Run: ``python -m benchmarks.residual.early``, about ten minutes of one core.
"""

import torch

from benchmarks import record
from plpkg import catalog, corpora, questions, residual
from plpkg.backbones import load_backbone
from plpkg.residual import attacks

PAGE, HEARD = 300, (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 300)


def middle(values) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_backbone("smollm2")
    personal = residual.load(model, catalog.data_path("diary") / "smollm2").eval()
    places = residual.matrices(personal)
    originals = {place: m.weight.data for place, m in places.items()}
    given, made = {}, {}

    def keep(place):
        def crossing(_, u, v):
            given[place], made[place] = u[0][0].half().float(), v[0].half().float()

        return crossing

    def pairs(ids):
        hooks = [m.register_forward_hook(keep(place)) for place, m in places.items()]
        with torch.no_grad():
            personal(input_ids=ids, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        return dict(given), dict(made)

    page = tokenizer("\n".join(entry.text for entry in corpora.diary().entries), return_tensors="pt")["input_ids"]
    u, v = pairs(page[:, :PAGE])
    facts = [question for question in corpora.diary().questions if question.kind == "fact"]
    asked = []
    for fact in facts:
        chat = [{"role": "user", "content": fact.question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        asked.append((ids, fact.answer))
    of_questions, _ = pairs(torch.cat([ids for ids, _ in asked[:5]], dim=1))

    rows = []
    for heard in HEARD:
        copies, shown = {}, []
        for place in u:
            first_u, first_v = u[place][:heard], v[place][:heard]
            copies[place] = torch.zeros_like(originals[place])
            if heard:
                copies[place] = torch.linalg.lstsq(first_u, first_v, driver="gelsd").solution.T
            spanned = of_questions[place] @ torch.linalg.qr(first_u.T).Q
            shown.append(float(spanned.square().sum() / of_questions[place].square().sum()))
        for place, m in places.items():
            m.weight.data = copies[place]
        right = 0
        for ids, answer in asked:
            written = personal.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
            right += questions.right(tokenizer.decode(written, skip_special_tokens=True), answer)
        for place, m in places.items():
            m.weight.data = originals[place]
        error = middle(attacks.relative_error(copies[place], originals[place]) for place in originals)
        rows.append({"heard": heard, "right": right, "asked": len(asked), "error": error, "shown": middle(shown)})
        print(rows[-1], flush=True)
    record.write("residual.early", rows)


if __name__ == "__main__":
    main()
