"""What the loader says while it works and when it is done: values only, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.model.load_plan import Skipped


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`rate` in bytes per second since the start, `eta` in seconds; `tensor` is the one being loaded."""

    bytes_done: int
    bytes_total: int
    rate: float
    eta: float
    tensor: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """`tensors` tensors stored as `stored` are held as `kind`, a format's label; `exact`: nothing was rounded.

    `error`: root of the squared error over the squared values, of the rows that were sampled; None if unmeasured.
    """

    stored: str
    kind: str
    exact: bool
    tensors: int
    error: float | None = None

    def line(self) -> str:
        """One line for a person."""
        how = "exact" if self.exact else "rounded"
        if self.error is not None:
            how += f", relative error {self.error:.2g}"
        return f"{self.tensors} tensors {self.stored} -> {self.kind}: {how}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load: what was read, how fast, how exact, what was left out and why.

    `tensors` and `nbytes` count what was read from `files`; `read_seconds` is the part of `seconds` spent in reads.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    read_seconds: float
    conversions: tuple[Conversion, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    mtp_present: bool

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def lines(self) -> list[str]:
        """The report for a person, one fact a line."""
        split = f"{self.read_seconds:.1f} s reading, {self.seconds - self.read_seconds:.1f} s converting"
        lines = [
            f"{self.tensors} tensors, {self.nbytes / 1e9:.2f} GB from {len(self.files)} file(s) in "
            f"{self.seconds:.1f} s ({self.gb_per_s:.2f} GB/s; {split})"
        ]
        lines.extend(item.line() for item in self.conversions)
        for skip in self.skipped:
            lines.append(
                f"skipped {skip.tensors} tensors ({skip.nbytes / 1e6:.1f} MB): {skip.reason}, e.g. {skip.example}"
            )
        return [*lines, *self.notes]
