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


class Spied:
    """SmolLM2 with the diary's M, and what the cloud sees of it."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_backbone("smollm2")
        self.personal = residual.load(self.model, catalog.data_path("diary") / "smollm2").eval()
        self.places = residual.matrices(self.personal)
        self.originals = {place: m.weight.data for place, m in self.places.items()}
        diary = "\n".join(entry.text for entry in corpora.diary().entries)
        self.page = self.tokenizer(diary, return_tensors="pt")["input_ids"][:, :PAGE]
        self.facts = [question for question in corpora.diary().questions if question.kind == "fact"]

    def ids_of(self, question: str) -> torch.Tensor:
        chat = [{"role": "user", "content": question}]
        form = dict(add_generation_prompt=True, return_tensors="pt", return_dict=False)
        return self.tokenizer.apply_chat_template(chat, **form)

    def pairs(self, ids: torch.Tensor) -> tuple[dict, dict]:
        """What crosses at each M while these tokens are read: u and v, ``(tokens, 64)``, rounded to 16 bits."""
        given, made = {}, {}

        def keep(place):
            def crossing(_, u, v):
                given[place], made[place] = u[0][0].half().float(), v[0].half().float()

            return crossing

        hooks = [m.register_forward_hook(keep(place)) for place, m in self.places.items()]
        with torch.no_grad():
            self.personal(input_ids=ids, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        return given, made

    def right(self, copies: dict[str, torch.Tensor]) -> int:
        """The facts that these matrices answer."""
        right = 0
        for place, m in self.places.items():
            m.weight.data = copies[place]
        for fact in self.facts:
            ids = self.ids_of(fact.question)
            written = self.personal.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
            right += questions.right(self.tokenizer.decode(written, skip_special_tokens=True), fact.answer)
        for place, m in self.places.items():
            m.weight.data = self.originals[place]
        return right


def main() -> None:
    torch.set_num_threads(1)
    spied = Spied()
    u, v = spied.pairs(spied.page)
    five = [spied.ids_of(fact.question) for fact in spied.facts[:5]]
    of_questions, _ = spied.pairs(torch.cat(five, dim=1))
    rows = []
    for heard in HEARD:
        copies, shown = {}, []
        for place in u:
            first_u, first_v = u[place][:heard], v[place][:heard]
            copies[place] = torch.zeros_like(spied.originals[place])
            if heard:
                copies[place] = torch.linalg.lstsq(first_u, first_v, driver="gelsd").solution.T
            spanned = of_questions[place] @ torch.linalg.qr(first_u.T).Q
            shown.append(float(spanned.square().sum() / of_questions[place].square().sum()))
        error = middle(attacks.relative_error(copies[place], spied.originals[place]) for place in u)
        right = spied.right(copies)
        rows.append({"heard": heard, "right": right, "asked": len(spied.facts), "error": error, "shown": middle(shown)})
        print(rows[-1], flush=True)
    record.write("residual.early", rows)


if __name__ == "__main__":
    main()
