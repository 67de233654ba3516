"""Draw the pictures of docs/tour.md: ``python notebooks/figures/draw.py`` (``make notebooks`` does it too).

It prints the lines that show them there, with their alternative texts.
"""

from pathlib import Path

from plpkg import autonomy, clipping, communication, residual, retention, serving, throughput
from plpkg.serving import service
from plpkg.show import theme

theme.use()
phone_alone = {"7B on the phone (reported, image)": 8.1, "7B on the phone (reported, text)": 5.7}
speed = throughput.plots.against_rtt(("llama-2-7b", "llama-2-13b", "llama-30b"), phone_alone, accounting="figure")
speed.figure.suptitle("Speed of a split model (computed)", size="medium", weight="bold")
segments = [(0, 4, 0), (4, 5, 1), (5, 8, 2), (8, 9, None)]
pictures = {
    "speed_against_rtt": speed,
    "split": communication.plots.split(),
    "ladder": residual.plots.ladder(),
    "cache": retention.plots.mechanism(),
    "layer": clipping.plots.layer(32, 128, 1024, 1024),
    "batch": serving.plots.batch(segments, ["Ann", "Bob", "Cem"]),
    "service": service.plots.service(),
    "devices": autonomy.plots.devices(),
}
for name, ax in pictures.items():
    path = Path(__file__).with_name(f"{name}.png")
    path.write_bytes(theme.png(ax.figure))
    print(f"![{theme.alt(ax.figure)}](../notebooks/figures/{path.name})")
