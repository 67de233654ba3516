from plpkg.show import drawing


def test_a_drawing_has_what_was_put_on_it_and_no_axes():
    ax = drawing.canvas(10, 4)
    drawing.lane(ax, 0, 0, 4, 4, "phone")
    drawing.box(ax, 1, 1, 2, 1, "embedding", drawing.colours(2)[1])
    drawing.arrow(ax, (3, 1.5), (8, 1.5), "h")
    drawing.note(ax, 9, 3, "later", ha="left")
    assert [text.get_text() for text in ax.texts if text.get_text()] == ["phone", "embedding", "h", "later"]
    (below, box) = (patch.get_window_extent().transformed(ax.transData.inverted()) for patch in ax.patches[:2])
    assert (round(box.x0, 6), round(box.x1, 6)) == (1, 3)
    assert below.contains(box.x0, box.y0)
    assert not ax.axison
    assert ax.figure.get_size_inches().tolist() == [7.2, 7.2 * 4 / 10]


def test_axes_that_are_given_are_drawn_on():
    ax = drawing.canvas(10, 4)
    assert drawing.canvas(5, 5, ax) is ax
