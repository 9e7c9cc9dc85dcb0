"""Tables and a plot of a `peers.py` run: medians, ranges, shares of the machine's limits, ratios within rounds.

Shares use the same formula for everyone: the bytes of an engine's own weights (experts as even routing hits them) over
the bandwidth read just before the measurement, and for prefill the larger of that and the operations over the fastest
unit for the weights. A ratio is the median of the ratios of each round, never of figures taken at different times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.engine.limits import Limits, Rate
from coterie.engine.traffic import attention_products, expected_hits
from coterie.spec.model import ModelSpec, MoESpec


class Report:
    """Reads the results of one run. `entrants` and `cases` are those of peers.py."""

    def __init__(self, data: dict[str, Any], folder: Path, entrants: Sequence[Any], cases: Sequence[Any]) -> None:
        self.data, self.entrants, self.cases = data, entrants, cases
        self.spec = ModelSpec.from_hf(folder)
        self.threads = data["settings"]["threads"]
        self.rounds = sorted({key.split("/")[0] for key in data["shots"]} - {"0"}, key=int)

    def shots(self, case: str, entrant: str) -> dict[str, dict[str, Any]]:
        """Counted measurements of a cell by round."""
        found = {number: self.data["shots"].get(f"{number}/{case}/{entrant}") for number in self.rounds}
        return {number: shot for number, shot in found.items() if shot is not None and "error" not in shot}

    def failure(self, case: str, entrant: str) -> str | None:
        ends = f"/{case}/{entrant}"
        errors = [shot["error"] for key, shot in self.data["shots"].items() if key.endswith(ends) and "error" in shot]
        return errors[0] if errors else None

    def cell(self, case: Any, entrant: Any) -> str:
        """`median (lowest..highest), share`."""
        shots = list(self.shots(case.name, entrant.name).items())
        if not shots:
            return "failed" if self.failure(case.name, entrant.name) else "-"
        rates = [shot["tokens"] / shot["seconds"] for _, shot in shots]
        share = statistics.median(self.share(case, entrant, number, shot) for number, shot in shots)
        middle, low, high = (number_text(rate) for rate in (statistics.median(rates), min(rates), max(rates)))
        return f"{middle} ({low}..{high}), {100 * share:.0f} %"

    def share(self, case: Any, entrant: Any, number: str, shot: dict[str, Any]) -> float:
        """Least time over the time taken."""
        always, experts, cache = self.weights(entrant)
        steps = case.steps if case.op == "decode" else -(-case.length // entrant.chunk)
        rows = case.batch if case.op == "decode" else min(case.length, entrant.chunk)
        context = case.context * case.batch if case.op == "decode" else case.length / 2
        memory = steps * (always + experts * self.hit_share(rows) + cache * context) / shot["read"]
        if case.op == "decode":
            return memory / shot["seconds"]
        kind = "int8" if entrant.bits <= 8 else "bf16"
        values = self.data["limits"][number]
        limits = Limits(0, tuple(Rate(probe, self.threads, (value,)) for probe, value in values.items()))
        return max(memory, self.operations(case.length) / limits.matrix_peak(kind, self.threads)) / shot["seconds"]

    def weights(self, entrant: Any) -> tuple[float, float, float]:
        """Bytes that every step reads, bytes of all routed experts, bytes of a token's cache rows."""
        load = self.data["loads"].get(entrant.name, {})
        cache = load.get("cache_bytes_per_token", self.spec.kv_bytes_per_token(2))
        if "always_bytes" in load:
            return load["always_bytes"], load["expert_bytes"], cache
        experts = active = 0
        for _, moe in self.spec.moe_layers():
            one = 3 * self.spec.hidden_size * moe.intermediate_size
            experts, active = experts + moe.num_experts * one, active + moe.top_k * one
        return 2 * (self.spec.num_active_parameters - active), 2 * experts, cache

    def hit_share(self, rows: float) -> float:
        """Share of the routed experts that so many tokens choose together."""
        layers: list[MoESpec] = [moe for _, moe in self.spec.moe_layers()]
        return sum(expected_hits(moe, rows) / moe.num_experts for moe in layers) / max(1, len(layers))

    def operations(self, length: int) -> float:
        """Of a prompt: every row through the layers, the last through the head."""
        head = 2 * self.spec.vocab_size * self.spec.hidden_size
        pairs = length * (length + 1) / 2
        return length * (self.spec.flops_per_token() - head) + head + 2 * pairs * attention_products(self.spec)

    def ratio(self, case: str, ours: str, peer: str) -> float | None:
        """Median over the rounds in which both were measured."""
        a, b = self.shots(case, ours), self.shots(case, peer)
        both = [b[number]["seconds"] / a[number]["seconds"] for number in a if number in b]
        return statistics.median(both) if both else None

    # Markdown

    def markdown(self) -> str:
        model, names = self.data["settings"]["model"], [entrant.name for entrant in self.entrants]
        lines = [f"### {model}, {self.threads} threads, medians of {len(self.rounds)} rounds", ""]
        lines += [self.limits_line(), ""]
        lines += table(["tok/s (range), share of the limit", *names], self.speeds())
        pairs = self.pairs()
        if pairs:
            rows = [[case.name, *(ratio_text(self.ratio(case.name, *pair)) for pair in pairs)] for case in self.cases]
            lines += ["", *table(["times as fast", *(f"{ours} : {peer}" for ours, peer in pairs)], rows)]
        notes = [f"{name} did not run: {reason}" for name, reason in self.data["absent"].items()]
        for entrant in self.entrants:
            for case in self.cases:
                failure = self.failure(case.name, entrant.name)
                if failure:
                    notes.append(f"{entrant.name}, {case.name}: {failure}")
        return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"

    def speeds(self) -> list[list[str]]:
        rows = [[case.name, *(self.cell(case, entrant) for entrant in self.entrants)] for case in self.cases]
        for title, key, scale, unit in (
            ("load", "load_s", 1.0, "s"), ("load and first token", "first_token_s", 1.0, "s"),
            ("weights read by one token", "one_token", 1e9, "GB"), ("peak memory", "rss", 1e9, "GB"),
        ):  # fmt: skip
            values = [self.of_load(entrant, key) for entrant in self.entrants]
            rows.append([title, *("-" if value is None else f"{value / scale:.2f} {unit}" for value in values)])
        return rows

    def of_load(self, entrant: Any, key: str) -> float | None:
        """A number about an engine rather than a case."""
        load = self.data["loads"].get(entrant.name)
        if load is None:
            return None
        if key == "one_token":
            always, experts, _ = self.weights(entrant)
            return always + experts * self.hit_share(1)
        if key == "rss":
            shots = [shot for case in self.cases for shot in self.shots(case.name, entrant.name).values()]
            return max([load["rss"], *(shot["rss"] for shot in shots)])
        return float(load[key])

    def limits_line(self) -> str:
        values = self.data["limits"].values()
        medians = {probe: statistics.median(one[probe] for one in values) for probe in next(iter(values), {})}
        reads = [shot["read"] for shot in self.data["shots"].values()] or [0.0]
        low, read, high = (value / 1e9 for value in (min(reads), medians.pop("read", 0.0), max(reads)))
        parts = [f"read {read:.1f} GB/s ({low:.1f}..{high:.1f} just before measurements)"]
        parts += [f"{probe} {value / 1e12:.2f} T operations/s" for probe, value in medians.items()]
        return "Limits: " + ", ".join(parts)

    def pairs(self) -> list[tuple[str, str]]:
        """Ours against every peer of the same width; ours of fewer bits against bf16 peers too, for prefill."""
        ours = [entrant for entrant in self.entrants if entrant.engine == "coterie"]
        peers = [entrant for entrant in self.entrants if entrant.engine != "coterie"]
        return [(a.name, b.name) for a in ours for b in peers if a.bits == b.bits or b.bits == 16]

    def plot(self, path: Path) -> None:
        """Bars per case, one colour per engine, in tokens a second."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, len(self.cases), figsize=(3.2 * len(self.cases), 3.8))
        for axis, case in zip(axes if len(self.cases) > 1 else [axes], self.cases, strict=True):
            for index, entrant in enumerate(self.entrants):
                shots = self.shots(case.name, entrant.name).values()
                if shots:
                    rate = statistics.median(shot["tokens"] / shot["seconds"] for shot in shots)
                    bar = axis.bar(index, rate, color=f"C{index}")
                    axis.bar_label(bar, [number_text(rate)], fontsize=7)
            axis.set_title(case.name, fontsize=8)
            axis.set_xticks(range(len(self.entrants)), [entrant.name for entrant in self.entrants], rotation=60,
                            ha="right", fontsize=7)  # fmt: skip
            axis.tick_params(axis="y", labelsize=7)
        figure.supylabel("tokens a second", fontsize=8)
        figure.suptitle(f"{self.data['settings']['model']}, {self.threads} threads", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def write_report(
    data: dict[str, Any], folder: Path, entrants: Sequence[Any], cases: Sequence[Any], base: Path
) -> None:
    """`base`.md, and `base`.png if matplotlib is there."""
    report = Report(data, folder, entrants, cases)
    base.with_name(base.name + ".md").write_text(report.markdown())
    try:
        report.plot(base.with_name(base.name + ".png"))
    except ImportError:
        print("no plot: matplotlib is not installed")


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def number_text(value: float) -> str:
    """Three digits, as far as they say anything."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
