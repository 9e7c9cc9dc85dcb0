"""The what-if page: a small local server whose page redraws budget, limits and Pareto front as inputs change.

Loopback only, no dependency, nothing loaded from elsewhere: the page, its script, and `/answer`, which is a search as
SVG and sentences. It reads no file that a request names: models and devices are those that ship, and those that the
command line gave. Not here: the charts (`draw`, `report`), the search.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args
from urllib.parse import SplitResult, parse_qsl, urlsplit

from coterie.planner.advice import sentences, shape
from coterie.planner.devices import device, devices
from coterie.planner.imbalance import Placement
from coterie.planner.known import known_of
from coterie.planner.layout import CacheName, WeightName, Wish, choose
from coterie.planner.measured import Measured
from coterie.planner.measured_file import read_engine
from coterie.planner.models import model, model_names
from coterie.planner.report import front_table, limits_chart, memory_chart, pareto_chart
from coterie.planner.search import Search, find
from coterie.planner.skew import Skew
from coterie.planner.workload import Slo
from coterie.spec.errors import CoterieError, SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

SKEW = re.compile(r"(uniform|trace|zipf|dirichlet)(:\d+(\.\d+)?(,\d+(\.\d+)?)*)?")
MOST_DEVICES = 1024
MOST_FIELDS = 40
PLACEMENTS = ("random", *(name for name in get_args(Placement) if name != "random"))
TYPES = {"page.html": "text/html", "page.js": "text/javascript"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be chosen: names of models and devices with their descriptions; the first ones are shown first. Of the
    first, which the command line gave: stored, the format that a file without a description of it holds; place, where
    the model lies (for the command that starts it); measured, our engine on the device."""

    models: dict[str, ModelSpec | None]
    hardware: dict[str, HardwareSpec]
    stored: WeightName | None = None
    place: str = ""
    measured: Measured | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


Reader = Callable[[str], tuple[str, ModelSpec, WeightName | None]]


def named(text: str) -> tuple[str, ModelSpec, WeightName | None]:
    """A model of a name, a folder or a config.json, which say their format."""
    return *model(text), None


def offer(first_model: str = "DeepSeek-R1", first_device: str = "b200", read: Reader = named) -> Offer:
    """Everything that ships, the given model and device in front. `read` finds the model. Raises SpecError if there is
    none of that name."""
    name, spec, stored = read(first_model)
    hardware = device(first_device)
    models: dict[str, ModelSpec | None] = {name: spec, **{each: None for each in model_names() if each != name}}
    others = {each.name: each for each in devices() if each.name != hardware.name}
    return Offer(models, {hardware.name: hardware, **others}, stored, first_model if Path(first_model).exists() else "",
                 read_engine(first_device))  # fmt: skip


def choices(offered: Offer) -> dict[str, Any]:
    """What the page puts into its lists."""
    return {
        "model": list(offered.models), "hardware": list(offered.hardware), "weights": ["auto", *get_args(WeightName)],
        "kv": list(get_args(CacheName)), "placement": list(PLACEMENTS),
    }  # fmt: skip


def answer(offered: Offer, values: Mapping[str, str]) -> dict[str, Any]:
    """The page's charts and sentences for its inputs. Raises SpecError in one line."""
    search, name, devices_, fixed = asked(offered, values)
    found = find(search, devices_)
    chosen = found.safe or found.bold
    shown = chosen or min(found.candidates, key=lambda each: each.tpot)
    layout, batch = shown.layout, shown.batch
    return {
        "budget": memory_chart(search, layout, batch),
        "limits": limits_chart(search, layout),
        "pareto": pareto_chart(found, search),
        "table": front_table(found.front, search),
        "words": sentences(found, search, name),
        "shown": f"budget and limits of {shape(layout)} at batch {batch}" + ("" if chosen else ", the fastest"),
        "fixed": dict(fixed),
    }


def asked(offered: Offer, values: Mapping[str, str]) -> tuple[Search, str, int, tuple[tuple[str, int], ...]]:
    """(search, model's name or place, devices, what is fixed of the layout)."""
    name, hardware_name = _one(values, "model", offered.models), _one(values, "hardware", offered.hardware)
    spec, hardware = offered.models[name] or model(name)[1], offered.hardware[hardware_name]
    count = _whole(values, "devices", 8, MOST_DEVICES)
    fixed = tuple((each, _whole(values, each, 1, MOST_DEVICES)) for each in ("tp", "ep") if values.get(each))
    first, shown = name == next(iter(offered.models)), hardware_name == next(iter(offered.hardware))
    weights = _one(values, "weights", ("auto", *get_args(WeightName)))
    if weights == "auto":
        weights = (offered.stored if first else None) or ""
    measured = offered.measured if shown else None
    wish = Wish(weights=weights or None, kv=_one(values, "kv", get_args(CacheName)))  # type: ignore[arg-type]
    skew = values.get("skew", "")
    if skew and not SKEW.fullmatch(skew):
        raise SpecError(f"{skew!r} is not a skew of this page: uniform, trace, zipf:S or dirichlet:A")
    like = replace(choose(spec, hardware, count, wish), redundant=0)
    search = Search(
        model=spec, hardware=hardware, like=like, fixed=fixed, known=known_of(spec, hardware, like, measured=measured),
        slo=Slo(_seconds(values, "ttft"), _seconds(values, "tpot")), isl=_whole(values, "isl", 4096, 10_000_000),
        osl=_whole(values, "osl", 1024, 10_000_000), skew=Skew.parse(skew) if skew else None,
        placement=_one(values, "placement", PLACEMENTS),  # type: ignore[arg-type]
        hit=_number(values, "hit", 0.0), utilisation=_number(values, "utilisation", 0.9),
        price_hour=_number(values, "price", 0.0), overlap=values.get("overlap") == "on",
    )  # fmt: skip
    return search, offered.place if first and offered.place else name, count, fixed


def _one(values: Mapping[str, str], name: str, possible: Any) -> str:
    value = values.get(name) or next(iter(possible))
    if value not in possible:
        raise SpecError(f"{name} {value!r} is not one of {', '.join(possible)}")
    return str(value)


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name) or ""
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"{name} must be a number, not {text!r}")
    return number


def _whole(values: Mapping[str, str], name: str, default: int, most: int) -> int:
    number = _number(values, name, default)
    if number != int(number) or not 1 <= number <= most:
        raise SpecError(f"{name} must be a whole number from 1 to {most:,}, not {number:g}")
    return int(number)


def _seconds(values: Mapping[str, str], name: str) -> float:
    """Milliseconds as seconds; empty for no limit."""
    return _number(values, name, 0.0) / 1e3 if values.get(name) else math.inf


class Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its script, the choices and `/answer`; nothing else, and only to this machine."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "coterie", ""
    timeout = 30

    def __init__(self, offered: Offer, *arguments: Any) -> None:
        self.offered = offered
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer one request."""
        try:
            host, place, values = self.request_parts()
        except ValueError as error:
            self.reply(400, "text/plain", f"this is no request for this page: {error}".encode())
            return
        if host not in ("127.0.0.1", "localhost", "::1"):
            self.reply(403, "text/plain", b"this page is served to this machine only")
            return
        name = "page.html" if place.path == "/" else place.path[1:]
        if name in TYPES:
            self.reply(200, TYPES[name], (files("coterie") / "data" / "planner" / name).read_bytes())
        elif name == "choices":
            self.reply_json(200, choices(self.offered))
        elif name == "answer":
            self.reply_json(*self.answered(values))
        else:
            self.reply(404, "text/plain", b"there is no such page")

    def request_parts(self) -> tuple[str, SplitResult, dict[str, str]]:
        """(host that was asked for, place, fields of the query). Raises ValueError for a request that has none."""
        host, place = urlsplit(f"//{self.headers.get('Host', '')}").hostname, urlsplit(self.path)
        return host or "", place, dict(parse_qsl(place.query, max_num_fields=MOST_FIELDS))

    def answered(self, values: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """An answer, or the one line of what is wrong; one search at a time."""
        try:
            with self.offered.lock:
                return 200, answer(self.offered, values)
        except CoterieError as error:
            return 400, {"error": " ".join(str(error).split())}

    def reply_json(self, status: int, document: Mapping[str, Any]) -> None:
        self.reply(status, "application/json", json.dumps(document).encode())

    def reply(self, status: int, kind: str, body: bytes) -> None:
        """Send a whole response; a browser that has gone does not want it."""
        with suppress(ConnectionError):
            self._send(status, kind, body)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is logged: it would be one's own clicks."""


def page_server(offered: Offer, port: int) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one. Raises OSError if it cannot listen."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, offered))
    server.daemon_threads = True
    return server
