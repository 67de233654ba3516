from benchmarks.backbones import asking, hands


def test_the_handwritten_set():
    rows = hands.handwritten()
    assert len(rows) == 30
    for note, question, answer in rows:
        assert answer in note
        assert answer not in question


def test_a_note_among_others():
    notes = [note for note, _, _ in hands.handwritten()]
    for note, among in zip(notes, asking.among(notes, 4), strict=True):
        assert sum(each in among for each in notes) == 4
        assert note in among
