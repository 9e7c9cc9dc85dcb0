"""The `engine` part of a hardware file: what `coterie plan calibrate` measured of our engine, as YAML and back.

The file's other fields are HardwareSpec's (`devices.read_device`). A file is somebody's input: every number is checked,
and what is wrong is named in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from coterie.planner.devices import is_file, read_yaml
from coterie.planner.measured import Constants, Measured, Share
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec

ENGINE = "engine"


def file_text(hw: HardwareSpec, measured: Measured) -> str:
    """The whole file: the device's fields, then the engine's shares as one table a form."""
    import yaml

    device = {name: value for name, value in asdict(hw).items() if value not in (0, 0.0, "")}
    curves: dict[tuple[str, float, float], dict[str, list[float]]] = {}
    for each in measured.shares:
        curve = curves.setdefault((each.form, each.unit, each.set_bytes), {"rows": [], "share": []})
        curve["rows"].append(each.rows)
        curve["share"].append(round(each.share, 4))
    engine = {
        "threads": measured.threads,
        "isa": measured.isa,
        "reads": [[size, round(rate, 3)] for size, rate in measured.reads],
        "constants": {name: float(f"{value:.4g}") for name, value in asdict(measured.constants).items()},
        "kernels": [
            {"form": form, "unit": unit, "set_bytes": size, **curve} for (form, unit, size), curve in curves.items()
        ],
    }
    return yaml.safe_dump({**device, ENGINE: engine}, sort_keys=False, default_flow_style=None, width=110)


def read_engine(name: str) -> Measured | None:
    """What a hardware file says of our engine; None for a device of the table or a file without that part.

    Raises SpecError that names the first thing that is wrong.
    """
    if not is_file(name):
        return None
    values = read_yaml(Path(name)).get(ENGINE)
    if values is None:
        return None
    try:
        return _engine(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise SpecError(f"{name}: the part '{ENGINE}' is not what `plan calibrate` writes: {said}") from error


def _engine(values: Mapping[str, Any]) -> Measured:
    reads = tuple((_above(size), _above(rate)) for size, rate in values["reads"])
    if not reads or list(reads) != sorted(reads):
        raise ValueError("reads must be pairs of ascending bytes and GB/s")
    shares = tuple(
        Share(str(curve["form"]), _above(curve["unit"]), _above(curve["set_bytes"]), _above(rows), _above(share))
        for curve in values["kernels"]
        for rows, share in zip(curve["rows"], curve["share"], strict=True)
    )
    constants = {field.name: _above(values["constants"][field.name], least=-1e-30) for field in fields(Constants)}
    return Measured(int(_above(values["threads"])), str(values["isa"]), reads, shares, Constants(**constants))


def _above(value: Any, least: float = 0.0) -> float:
    """A finite number above `least`; YAML reads 1e-05 as text."""
    number = float("nan") if isinstance(value, bool) else float(value)
    if not least < number < 1e18:
        raise ValueError(f"{value!r} is not a number above {max(0.0, least):g}")
    return number
