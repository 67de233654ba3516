"""What ``benchmarks/residual*.py`` measured, as tables: the wire, personalisation, a changed backbone, attacks.

Every number is *measured (recorded)*. Intervals are 95 % of Student's t over the writers, whose seeds are averaged.
"""

from plpkg import catalog
from plpkg.validation import one_of

LORA = "LoRA r=16"
"""What everything is compared with: LoRA on q, k and v, cut so that full activations cross."""


def gains():
    """Bits per byte below the untuned model: by method and writer, means over the seeds."""
    rows = catalog.measured("residual_quality").query("section == 'quality'")
    return rows.pivot_table(index="method", columns="case", values="gain", sort=False)


def personalisation():
    """Each method's mean over writers, whose seeds are averaged.

    Returns
    -------
    pandas.DataFrame
        By method: ``bits_per_byte`` of held-out text; ``gain`` over the untuned model, with its interval's half-width
        ``gain_ci``; ``share_of_lora``, of LoRA's mean gain; the adapter's ``rank`` and ``targets``; ``trained``
        parameters; ``bytes_per_token`` on the wire with both end points, and ``share_of_actual``: of LoRA's full
        activations; ``device_mb``, the weights on the device.
    """
    import pandas as pd

    by_method = catalog.measured("residual_quality").query("section == 'quality'").groupby("method", sort=False)
    gain = gains()
    found = {
        "bits_per_byte": by_method["bits_per_byte"].mean(),  # as many seeds for each writer
        "gain": gain.mean(axis=1),
        "gain_ci": gain.apply(half_width, axis=1),
        "share_of_lora": gain.mean(axis=1) / gain.loc[LORA].mean(),
    }
    costs = ["rank", "targets", "trained", "bytes_per_token", "share_of_actual", "device_mb"]
    return pd.DataFrame(found).join(by_method[costs].first())


def half_width(values) -> float:
    """Half of the 95 % interval of a mean; NaN for fewer than two values."""
    from scipy.stats import t

    n = len(values)
    return float(t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else float("nan")


def score_table():
    """Like the publication's: speed on this machine, next-token accuracy of held-out text, M_S.

    Returns
    -------
    pandas.DataFrame
        By method: ``tokens_per_s`` at 60/100 Mb/s without delay, ``accuracy`` in per cent, ``m_s``, ``device_mb``;
        means.
    """
    rows = catalog.measured("residual_quality").query("section == 'quality' and tokens_per_s.notna()")
    return rows.groupby("method", sort=False)[["tokens_per_s", "accuracy", "m_s", "device_mb"]].mean()


def speed():
    """Tokens per second: by method and link."""
    rows = catalog.measured("residual_quality").query("section == 'speed'")
    return rows.pivot_table(index="method", columns="case", values="tokens_per_s", sort=False)


def links():
    """A token's time on limited links, beside the formula's.

    Returns
    -------
    pandas.DataFrame
        ``link``: what crosses, its delay, how many sequences at once; ``waits``: whether both ends sleep while they
        wait, or keep looking; ``formula_ms``; ``ms_per_token``, a token's time less its time without limits, and its
        ``ratio`` to the formula, with the blocks' quartiles ``ratio_q1`` and ``ratio_q3``; for single sequences
        ``held_ms``, how long the relay kept its messages, and ``held_ratio``.
    """
    rows = catalog.measured("residual_wire").query("section == 'link'").reset_index(drop=True)
    many = rows["batch"].map(lambda batch: f", {batch:.0f} sequences" if batch > 1 else "")
    rows["link"] = rows["what"] + rows["case"].str.extract("(, RTT .*)")[0] + many
    shown = ["formula_ms", "ms_per_token", "ratio", "ratio_q1", "ratio_q3", "held_ms", "held_ratio"]
    return rows[["link", "waits", *shown]]


def speed_ups():
    """Low rank's tokens per second over those of full activations, by link and way of waiting; single sequences."""
    rows = catalog.measured("residual_wire").query("section == 'link' and batch == 1")
    speeds = rows.pivot_table(index=["case", "waits"], columns="what", values="tokens_per_s", sort=False)
    found = speeds.div(speeds.pop("full activations"), axis=0)
    return found.rename_axis(index=["speed over full activations'", "waits"], columns="")


def round_trips():
    """Median and 99th percentile in µs of a message there and back on loopback, by what carries it."""
    rows = catalog.measured("residual_wire").query("section == 'round trip'").set_index("what")
    return rows[["median_us", "p99_us"]].astype(int).rename_axis(index="400 bytes there and back")


def two_processes():
    """The divided model's speed over the undivided one's in one process: by how it waits, and on limited links.

    What the links limit goes through a relay that has the same cores.
    """
    import pandas as pd

    measured = catalog.measured("residual_wire")
    rows = measured.query("section == 'speed'")
    table = rows.pivot_table(index="what", columns="waits", values="ratio", sort=False)
    limited = measured.query("section == 'link' and what == 'r=64' and batch == 1")
    speeds = limited.pivot_table(index="case", columns="waits", values="tokens_per_s", sort=False)
    whole = rows.query("what == 'one process'").set_index("waits")["tokens_per_s"]
    table = pd.concat([table, (speeds / whole).rename("split, {}".format)])
    return table.rename_axis(index="speed over one process's", columns="")


def diary():
    """Questions answered exactly: by method and kind."""
    rows = catalog.measured("residual_diary")
    shown = rows.assign(answered=rows["right"].astype(int).astype(str) + " of " + rows["asked"].astype(int).astype(str))
    return shown.pivot_table(index="method", columns="case", values="answered", aggfunc="first", sort=False)


def migration():
    """What becomes of an adapter when its backbone changes.

    Returns
    -------
    pandas.DataFrame
        By what was done: bits per byte of held-out text for each writer and in the ``mean``; the mean ``gain`` over the
        same backbone without M; CPU seconds, ``cpu_s``.
    """
    rows = catalog.measured("residual_quality").query("section == 'migration' and bits_per_byte.notna()")
    table = rows.pivot_table(index="method", columns="case", values="bits_per_byte", sort=False)
    mean = table.mean(axis=1)
    old = mean.index.str.startswith("old backbone")
    without = mean["updated backbone, no M"] + old * (mean["old backbone, no M"] - mean["updated backbone, no M"])
    return table.assign(mean=mean, gain=without - mean, cpu_s=rows.groupby("method")["cpu_s"].mean())


ATTACKS = ("quality", "plain", "m", "inversion", "noise", "answers", "embedding", "nonlinear")


def attack(section: str):
    """The rows of one section of ``benchmarks/residual/attacks.py``, without empty columns and without their origin.

    Parameters
    ----------
    section
        One of :data:`ATTACKS`.
    """
    rows = catalog.measured("residual_attacks")
    rows = rows[rows["section"] == one_of("section", section, ATTACKS)]
    origin = ["section", "command", "commit", "seed", "machine", "versions"]
    return rows.drop(columns=origin).dropna(axis=1, how="all").reset_index(drop=True)


COSTS = ["bits_per_byte", "device_parameters", "flops_per_token", "bytes_per_token"]


def embedding():
    """Of each secret embedding: the quality that is left, the device's costs, and the share each attacker recovers."""
    return attack("embedding").pivot_table(index=["case", *COSTS], columns="attacker", values="recovered", sort=False)


def nonlinear():
    """Of each function in the place of M: errors of copies and of the best matrices, quality with the copies, costs."""
    return attack("nonlinear").set_index("case")[["error", "linear_error", "copy_bits_per_byte", *COSTS]]


def answers():
    """By noise on the answers and tokens seen: the error of the M computed, the owner's quality, and the copy's."""
    return attack("answers").set_index(["x", "case"])[["error", "bits_per_byte", "copy_bits_per_byte"]]


def strongest_inversion():
    """The share of tokens that the best attacker recovered, by the number of layers on the device."""
    return attack("inversion").groupby("x")["recovered"].max()
