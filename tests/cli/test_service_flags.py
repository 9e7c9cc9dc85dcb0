"""Flags of service classes and the file of keys: each reaches the config, each mistake is one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from coterie.cli.main import run
from coterie.cli.service import SERVICE_OPTIONS, read_keys, service_config
from coterie.engine.config import NO_CLASSES, ServiceConfig
from coterie.server.config import ApiKey
from coterie.spec.errors import CoterieError

ON = ServiceConfig(enabled=True)


def parse(*arguments: str) -> ServiceConfig:
    found = []

    @click.command()
    def verb(**values):
        found.append(service_config(values))

    for option in reversed(SERVICE_OPTIONS):
        verb = option(verb)
    result = CliRunner().invoke(verb, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return found[0]


def test_every_field_has_a_flag_and_none_of_them_means_one_class():
    names = {option.name for option in click.Command("x", params=_params()).params}
    assert names == {field.name for field in fields(ServiceConfig)}
    assert parse() == NO_CLASSES and parse("--service-classes") == ON


def _params():
    @click.command()
    def verb(**values):
        pass

    for option in reversed(SERVICE_OPTIONS):
        verb = option(verb)
    return verb.params


def test_values_are_given_by_class():
    made = parse(
        "--service-classes", "--default-class", "bronze", "--class-weight", "gold=2", "--class-weight", "bronze=0.5",
        "--class-slo", "silver=7.5", "--class-max-queued", "gold=9",
    )  # fmt: skip
    assert made == ServiceConfig(
        enabled=True, default_class="bronze", weights=(2.0, 1.0, 0.5), slo_seconds=(2.0, 7.5, 60.0),
        max_queued=(9, None, None),
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [
    ["--class-weight", "gold=2"], ["--default-class", "gold"], ["--service-classes", "--class-weight", "gold"],
    ["--service-classes", "--class-weight", "iron=2"], ["--service-classes", "--class-slo", "gold=nan"],
    ["--service-classes", "--class-slo", "gold=-1"], ["--service-classes", "--class-max-queued", "gold=1.5"],
    ["--service-classes", "--class-slo", "gold=inf"], ["--service-classes", "--default-class", "iron"],
])  # fmt: skip
def test_what_makes_no_sense_is_a_usage_error(wrong, capsys):
    assert run(["serve", "--port", "0", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_too_large_values_are_one_line(capsys):
    assert run(["serve", "--port", "0", "--service-classes", "--class-weight", "gold=1e9"]) == 1
    assert capsys.readouterr().err.startswith("error: class weights must lie between")


def keys(tmp_path: Path, text: str, service: ServiceConfig = ON) -> tuple[ApiKey, ...]:
    file = tmp_path / "keys"
    file.write_text(text)
    return read_keys(file, service)


def test_keys_are_bound_by_the_file(tmp_path):
    assert keys(tmp_path, "one\n", NO_CLASSES) == (ApiKey("one"),)
    assert keys(tmp_path, "\n one \n\ttwo\n") == (ApiKey("one"), ApiKey("two"))
    bound = keys(tmp_path, "one gold\ntwo  bronze\nthree\n")
    assert bound == (ApiKey("one", "gold"), ApiKey("two", "bronze"), ApiKey("three", "silver"))


@pytest.mark.parametrize(("text", "service", "said"), [
    ("", ON, "is empty"), ("\n \n", ON, "is empty"), ("a gold\na bronze\n", ON, "line 2: this key stands in the file"),
    ("a iron\n", ON, "line 1: after the key stands its class"), ("a gold b\n", ON, "line 1: after the key"),
    ("b\na gold\n", NO_CLASSES, "line 2 binds a key to a class; start with --service-classes"),
    ("schlüssel\n", ON, "no header can carry"),
])  # fmt: skip
def test_a_file_that_cannot_be_right_is_refused_without_showing_a_key(tmp_path, text, service, said):
    with pytest.raises(CoterieError, match=said) as caught:
        keys(tmp_path, text, service)
    assert "schlüssel" not in str(caught.value)
