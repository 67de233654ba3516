"""Results that show themselves as a table and hand over its data."""

from html import escape


class Tabular:
    """A result that is also a small table. Subclasses define :meth:`rows` and their own ``__repr__``."""

    def rows(self) -> list[dict]:
        """The table, one dict a row, all with the same keys; values keep their full precision."""
        raise NotImplementedError

    def to_frame(self):
        """The table as a ``pandas.DataFrame``: the data behind this result's figure."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def _repr_html_(self) -> str:
        rows = self.rows()
        columns = rows[0] if rows else ()
        head = "".join(f"<th>{escape(str(column))}</th>" for column in columns)
        body = ""
        for row in rows:
            cells = "".join(f"<td>{escape(shown(value))}</td>" for value in row.values())
            body += f"<tr>{cells}</tr>"
        caption = f"<caption style='text-align: left; white-space: nowrap'>{escape(repr(self))}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Sentences(Tabular):
    """A table with sentences in it: its frame, and frames made from that, show them in full (pandas cuts at 50)."""

    def to_frame(self):
        import pandas as pd

        class Frame(pd.DataFrame):
            _constructor = property(lambda self: Frame)

            def __repr__(self) -> str:
                with pd.option_context("display.max_colwidth", None):
                    return super().__repr__()

            def _repr_html_(self) -> str:
                with pd.option_context("display.max_colwidth", None):
                    return super()._repr_html_()  # pyright: ignore[reportAttributeAccessIssue] (pandas has one)

        return Frame(self.rows())


def shown(value: object) -> str:
    """A table cell: numbers with thousands separators, floats with at least four significant digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def bits(count: float) -> str:
    """A number of bits in decimal units: ``229.4 kbit``, ``4.194 Mbit``, ``1.049 Gbit``."""
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g} bit"
