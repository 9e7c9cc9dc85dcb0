"""The devices that ship with the package, and those that a user describes in a YAML file.

The table is `data/planner/hardware.csv`: HardwareSpec's fields, published dense rates and the source of each row. Names
are forgiving (`h100`, `b200`, `mi300x`); an unknown one is refused with near ones. Not here: what share of a peak
software reaches (`calibrate`).
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from coterie.planner.cpu_server import PREFIX, CpuServer
from coterie.spec.errors import SpecError
from coterie.spec.hardware import DeviceKind, HardwareSpec, Topology

MAX_FILE_BYTES = 1 << 20
_CHOICES = {"kind": get_args(DeviceKind), "topology": get_args(Topology)}
_FIELDS: Mapping[str, Field[Any]] = {field.name: field for field in fields(HardwareSpec)}


@cache
def devices() -> tuple[HardwareSpec, ...]:
    """Every device of the table, in its order."""
    return tuple(spec for spec, _ in _table())


def device(name: str) -> HardwareSpec:
    """The device of a name, of a YAML file's path, or of a CPU server's data (`cpu:channels=12,...`). Raises SpecError
    with near names, or with the wrong field."""
    if name.startswith(PREFIX):
        return CpuServer.parse(name).hardware()
    if is_file(name):
        return read_device(Path(name))
    wanted = _plain(name)
    if not wanted:
        raise SpecError(f"a device needs a name; possible are {', '.join(spec.name for spec in devices())}")
    for spec, aliases in _table():
        if wanted in {_plain(spec.name), *map(_plain, aliases)}:
            return spec
    words = [_plain(word) for word in re.split(r"[\s_-]+", name) if _plain(word)]
    holding = [spec for spec in devices() if all(word in _plain(spec.name) for word in words)]
    if len(holding) == 1 and len(wanted) > 3:
        return holding[0]
    names = {_plain(label): spec.name for spec, aliases in _table() for label in (spec.name, *aliases)}
    near = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    near += [label for label in names if label not in near and (wanted in label or label in wanted)]
    found = list(dict.fromkeys(names[label] for label in near)) or [spec.name for spec in devices()]
    raise SpecError(
        f"there is no device {name!r}; {'near are' if near else 'possible are'} {', '.join(found)}, or a YAML file of "
        "your own"
    )


def is_file(name: str) -> bool:
    """Whether a device's name is the path of a hardware file."""
    return not name.startswith(PREFIX) and (name.endswith((".yaml", ".yml", ".json")) or "/" in name)


def read_device(path: Path) -> HardwareSpec:
    """A device from a YAML file of HardwareSpec's fields; a part `engine` is left to `measured_file`. Raises SpecError
    that names what is wrong or missing."""
    values = {name: value for name, value in read_yaml(path).items() if name != "engine"}
    return _spec({"name": path.stem, **values}, str(path))


def read_yaml(path: Path) -> Mapping[Any, Any]:
    """The fields of a hardware file, unchecked. Raises SpecError for a file that is none."""
    import yaml

    try:
        with path.open("rb") as file:  # bounded by what comes: a device or pipe has no size
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise SpecError(f"{path} is larger than 1 MiB; that is no description of a device")
        values = yaml.safe_load(raw.decode("utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}; expected a YAML file of a device") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise SpecError(f"{path} holds no fields; needed are {', '.join(_needed())}")
    return values


def _spec(values: Mapping[Any, Any], where: str) -> HardwareSpec:
    unknown = [str(name) for name in values if name not in _FIELDS]
    if unknown:
        hints = [f"{name} (did you mean {_near_field(name)}?)" if _near_field(name) else name for name in unknown]
        raise SpecError(f"{where}: unknown field {', '.join(hints)}; possible are {', '.join(_FIELDS)}")
    missing = [name for name in _needed() if values.get(name) is None]
    if missing:
        raise SpecError(f"{where}: missing {', '.join(missing)}")
    return HardwareSpec(**{name: _value(name, value, where) for name, value in values.items() if value is not None})


def _value(name: str, value: Any, where: str) -> Any:
    """A field's value with its type checked; text that is a number counts, as YAML reads 1e3 as text."""
    kind = str(_FIELDS[name].type)
    if kind == "bool" and isinstance(value, bool):
        return value
    if name in _CHOICES and value not in _CHOICES[name]:
        raise SpecError(f"{where}: {name} {value!r} is not one of {', '.join(_CHOICES[name])}")
    if kind in ("int", "float"):
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if number != number or (kind == "int" and number != int(number) if abs(number) < 1e15 else kind == "int"):
            raise SpecError(f"{where}: {name} {value!r} is not {'a whole' if kind == 'int' else 'a'} number")
        return int(number) if kind == "int" else number
    if isinstance(value, str | int | float) and not isinstance(value, bool) and kind != "bool":
        return str(value)
    raise SpecError(f"{where}: {name} {value!r} is not {'true or false' if kind == 'bool' else 'a text'}")


def _needed() -> list[str]:
    return [name for name, field in _FIELDS.items() if field.default is MISSING]


def _near_field(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, _FIELDS, n=1)), "")


def _plain(name: str) -> str:
    """A name without case and punctuation, a plus kept."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


@cache
def _table() -> tuple[tuple[HardwareSpec, tuple[str, ...]], ...]:
    """(device, other names) of every row."""
    text = (files("coterie") / "data" / "planner" / "hardware.csv").read_text(encoding="utf-8")
    rows = []
    for row in csv.DictReader(text.splitlines()):
        aliases = tuple(row.pop("aliases").split())
        values = {name: value for name, value in row.items() if value}
        rows.append((_spec(values, f"hardware.csv, {row['name']}"), aliases))
    return tuple(rows)
