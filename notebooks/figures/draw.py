"""Draw the README's picture: ``python notebooks/figures/draw.py`` (``make notebooks`` does it too)."""

from pathlib import Path

from plpkg import theme, throughput

theme.use()
phone_alone = {"7B on the phone (reported, image)": 8.1, "7B on the phone (reported, text)": 5.7}
ax = throughput.plots.against_rtt(("llama-2-7b", "llama-2-13b", "llama-30b"), phone_alone, accounting="figure")
ax.figure.suptitle("Speed of a split model (computed)", size="medium", weight="bold")
path = Path(__file__).with_name("speed_against_rtt.png")
path.write_bytes(theme.png(ax.figure))
print(theme.alt(ax.figure))
