"""The command itself: lazy verbs, help, and that every mistake is one line on stderr with the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from coterie import __version__
from coterie.cli import main as main_module
from coterie.cli.common import ENGINE_OPTIONS, engine_config, engine_options
from coterie.cli.main import VERBS, cli, run
from coterie.cli.ranges import FiniteRange
from coterie.engine.config import OPTION_NAMES, EngineConfig
from coterie.spec.errors import CoterieError


def python(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    return lines[0]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Make `coterie version` raise a given exception."""

    def install(error: BaseException) -> None:
        @click.command()
        @main_module.debug_option
        def verb() -> None:
            raise error

        monkeypatch.setattr(main_module.VerbGroup, "get_command", lambda self, ctx, name: verb)

    return install


def test_help_lists_all_verbs_and_imports_no_engine():
    code = (
        "import sys; from coterie.cli.main import run; status = run(['--help']);"
        "heavy = {'numpy', 'torch', 'msgspec', 'rich', 'coterie.engine', 'coterie.kernels', 'coterie.server'};"
        "sys.exit(status or ' '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    for verb, (_, text) in VERBS.items():
        assert verb in result.stdout
        assert text in result.stdout


def test_module_and_command_say_the_same():
    assert python("-m", "coterie").stdout == python("-m", "coterie", "--help").stdout.replace("\r", "")
    assert python("-m", "coterie", "--version").stdout == f"coterie {__version__}\n"


def test_version_names_python_and_packages():
    result = python("-m", "coterie", "version")
    assert result.returncode == 0
    assert result.stdout.startswith(f"coterie {__version__}\n")
    assert "numpy" in result.stdout


def test_what_the_terminal_cannot_show_is_an_escape():
    code = (
        "import click; from coterie.cli import main\n"
        "@click.command()\ndef verb(): click.echo('é 地 😀')\n"
        "main.VerbGroup.get_command = lambda self, ctx, name: verb\nmain.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "version"], capture_output=True, timeout=120, check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, b"\xe9 \\u5730 \\U0001f600\n"), result.stderr


def test_unknown_command_names_the_possible_ones():
    result = python("-m", "coterie", "server")
    assert result.returncode == 2
    assert error_line(result) == (
        f"error: there is no command 'server'; possible are {', '.join(VERBS)} (see 'coterie --help')"
    )


@pytest.mark.parametrize(
    ("flags", "possible"),
    [
        (["--backend", "cuda"], "'native', 'reference'"),
        (["--page-size", "0"], "x>=1"),
        (["--mem-fraction-static", "1.5"], "<=1"),
        (["--max-model-len", "many"], "not a valid integer"),
        (["--isa", "sse"], "'avx2'"),
        (["--temperature", "-1"], "x>=0"),
        (["--top-p", "-0.1"], "0.0<=x<=1.0"),
        (["--mem-fraction-static", "nan"], "nan is not a finite number"),
        (["--temperature", "inf"], "inf is not a finite number"),
        (["--prompt-ids", "1,x"], "whole numbers with commas"),
        (["--nonsense"], "--nonsense"),
        ([], "exactly one of --prompt, --prompt-file and --prompt-ids"),
        (["--prompt", "a", "--prompt-ids", "1"], "given: --prompt and --prompt-ids"),
    ],
)
def test_bad_flags_are_refused_with_what_is_possible(flags, possible, capsys):
    assert run(["generate", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert possible in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "verb", [["generate", "--prompt-ids", "1"], ["serve"], ["bench", "latency"], ["quantize", "out"]]
)
def test_a_url_is_no_model_and_is_shown_as_it_was_written(verb, capsys):
    url = "https://host/some/model"
    assert run([*verb, url] if verb[0] == "bench" else [verb[0], url, *verb[1:]]) in (1, 2)
    error = capsys.readouterr().err
    assert f"error: {url} is a URL and models are not fetched; give a folder" in error and error.count("\n") == 1


def test_missing_model_folder_and_wrong_folder(tmp_path, capsys):
    assert run(["generate", str(tmp_path / "nowhere"), "--prompt-ids", "1"]) == 1
    assert "there is no model folder" in capsys.readouterr().err
    assert run(["generate", str(tmp_path), "--prompt-ids", "1"]) == 1
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert run(["generate", str(tmp_path / "config.json"), "--prompt-ids", "1"]) == 1
    assert "give the folder" in capsys.readouterr().err
    assert run(["generate", str(tmp_path), "-m", "other", "--prompt-ids", "1"]) == 2
    assert "two models" in capsys.readouterr().err


def test_unreadable_config_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert run(["generate", str(tmp_path), "--prompt-ids", "1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "config.json" in error
    assert "unexpected" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CoterieError("too\n  big"), 1, "error: too big"),
        (OSError(98, "Address already in use"), 1, "error: Address already in use"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 1, "error: No such file or directory: x.json"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), 1, "pip install 'coterie[torch]'"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division by zero"),
    ],
)
def test_every_error_becomes_one_line(error, code, said, failing, capsys):
    failing(error)
    assert run(["version"]) == code
    shown = capsys.readouterr().err.strip()
    assert said in shown
    assert "Traceback" not in shown
    assert len(shown.splitlines()) == 1


def test_debug_shows_the_traceback_and_still_the_line(failing, capsys):
    failing(ZeroDivisionError("division by zero"))
    assert run(["version", "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.strip().splitlines()[-1].startswith("error: unexpected ZeroDivisionError")


def test_engine_flags_cover_the_engine_config_and_mean_its_fields():
    seen: list[EngineConfig] = []

    @click.command()
    @engine_options
    def verb(**values: object) -> None:
        seen.append(engine_config(values))

    names = {parameter.name for parameter in verb.params}
    assert OPTION_NAMES - names == {"seed"}
    assert len(verb.params) >= len(ENGINE_OPTIONS)
    verb.main([], standalone_mode=False)
    assert seen[-1] == EngineConfig()
    verb.main(["--max-num-seqs", "3", "--max-num-batched-tokens", "7", "--no-prefix-caching", "--kv-cache-dtype",
               "float32", "-t", "2", "-c", "99", "--strict"], standalone_mode=False)  # fmt: skip
    assert seen[-1] == EngineConfig(
        max_running_requests=3, chunked_prefill_size=7, enable_prefix_caching=False, kv_cache_dtype="float32",
        threads=2, max_model_len=99, strict=True,
    )  # fmt: skip
    verb.main(["--max-running-requests", "4", "--chunked-prefill-size", "8"], standalone_mode=False)
    assert seen[-1] == EngineConfig(max_running_requests=4, chunked_prefill_size=8)


def test_server_flags_cover_the_server_config_and_help_prints_the_limits():
    from coterie.cli.serve import SERVER_OPTIONS, serve, server_config
    from coterie.server.config import Access, AdminConfig, ConnectionLimits, ParserNames, ServerConfig, TlsConfig

    flags = {parameter.name: parameter for parameter in serve.params}
    assert {field.name for field in fields(ServerConfig)} - {"connections", "access", "parsers"} <= flags.keys()
    assert {field.name for field in fields(ConnectionLimits)} <= flags.keys()
    assert {f"ssl_{field.name}" for field in fields(TlsConfig)} <= flags.keys()
    assert {"api_key", "api_key_file"} <= flags.keys() and len(fields(Access)) == 3
    assert {"admin_key_file", "admin_model_dir"} <= flags.keys() and len(fields(AdminConfig)) == 2
    asked = "--reasoning-parser none --tool-call-parser qwen3 --enable-auto-tool-choice"
    named = serve.make_context("serve", asked.split())
    assert server_config(named.params).parsers == ParserNames(reasoning="none", tool_calls="qwen3")
    asked = "--max-connections 2 --max-header-bytes 3 --max-header-seconds 4 --keep-alive-seconds 5"
    named = serve.make_context("serve", [*asked.split(), "--max-unread-seconds", "6"])
    assert server_config(named.params).connections == ConnectionLimits(
        max_connections=2, max_header_bytes=3, max_header_seconds=4.0, keep_alive_seconds=5.0, max_unread_seconds=6.0
    )
    context = serve.make_context("serve", [])
    assert server_config(context.params) == ServerConfig()
    text = " ".join(serve.get_help(context).split())
    limits = {name for name in flags if name.startswith(("max_", "template_")) and hasattr(ServerConfig(), name)}
    assert len(limits) == 8 and len(SERVER_OPTIONS) > len(limits)
    for name in limits:
        flag, value = flags[name].opts[0], getattr(ServerConfig(), name)
        said = text.partition(f"{flag} ")[2].partition(" --")[0]
        assert f"[default: {value};" in said, f"--help says nothing of {flag} and its default"
    asked = "--max-body-seconds 1.5 --max-json-depth 7 --max-prompts 8 --max-choices 9 --max-messages 10"
    given = serve.make_context("serve", [*asked.split(), "--template-seconds", "2", "--template-max-chars", "11"])
    assert server_config(given.params) == ServerConfig(
        max_body_seconds=1.5, max_json_depth=7, max_prompts=8, max_choices=9, max_messages=10, template_seconds=2.0,
        template_max_chars=11,
    )  # fmt: skip
    for flag in ("--max-prompts", "--max-body-seconds", "--template-seconds"):
        assert run(["serve", flag, "0"]) == 2
    for flag in ("--max-body-seconds", "--template-seconds", "--sse-ping-interval", "--shutdown-timeout",
                 "--log-interval"):  # fmt: skip
        assert run(["serve", flag, "nan"]) == run(["serve", flag, "inf"]) == 2


def test_every_verb_has_help():
    for verb in VERBS:
        result = cli.get_command(click.Context(cli), verb)
        assert result is not None
        assert result.help


def test_train_without_a_recipe_shows_its_help_and_its_length_is_a_number(capsys):
    assert run(["train"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: coterie train") and "prepare" in shown.out and shown.err == ""
    assert run(["train", "demo", "--out", "unused", "--minutes", "nan"]) == 2
    assert "nan is not a finite number" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "a b", "schlüssel", " Q7x", "Q7x\n"])
def test_a_key_that_could_never_be_sent_is_refused(key, capsys):
    assert run(["serve", "--port", "0", "--api-key", key]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --api-key ") and error.count("\n") == 1
    assert key.strip() == "" or key.strip() not in error, "a key is not shown"


def test_ready_text_of_a_model_without_a_tokenizer_asks_with_ids():
    from coterie.cli.serve import ready_text

    text = ready_text("http://h/v1", "m", needs_key=False, takes_text=False)
    assert """'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 40, "logprobs": 0}'""" in text
    assert "prompt=[1, 2, 3], max_tokens=40, logprobs=0).choices[0].logprobs.tokens)" in text
    assert "To be" not in text


def test_interrupt_while_waiting_for_input_ends_cleanly(tmp_path):
    code = "import sys, time; print('up', flush=True); time.sleep(60)"
    script = tmp_path / "verb.py"
    script.write_text(
        "import click\nfrom coterie.cli import main\n"
        f"@click.command()\ndef verb():\n    exec({code!r})\n"
        "main.VerbGroup.get_command = lambda self, ctx, name: verb\nmain.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), "version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "error: interrupted"


@pytest.mark.parametrize("group", [[], ["plan"], ["bench"], ["train"]])
def test_a_group_alone_shows_its_commands(group: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(group) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) > 5 and shown.out.startswith("Usage: coterie") and not shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "record", "--text", __file__, "--out"],
        ["plan", "calibrate", "--out"],
        ["plan", "search", "v3", "--hw", "h200", "-n", "8", "--report"],
        ["bench", "serve", "--port", "1", "--plot"],
    ],
)
def test_a_folder_that_is_not_there_is_refused_before_the_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for work in ("engine.llm.LLM", "cli.plan_calibrate.measure", "cli.plan_search.find", "cli.bench_serve.measure"):
        monkeypatch.setattr(f"coterie.{work}", None)
    file = tmp_path / "none" / "file"
    assert run([*arguments, str(file)]) == 1
    assert capsys.readouterr().err == f"error: cannot write {file}: there is no folder {file.parent}\n"


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, by its words."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", found) for below, found in commands(command, context))
        else:
            yield name, command


def test_no_flag_of_any_verb_takes_what_is_no_number():
    """NaN passes every comparison of a plain range; infinity only `bench serve --request-rate` means."""
    found = dict(commands(cli, click.Context(cli)))
    assert {"serve", "bench latency", "plan step"} <= set(found)
    for name, command in found.items():
        for parameter in command.params:
            if isinstance(parameter.type, click.FloatRange):
                assert isinstance(parameter.type, FiniteRange) or parameter.name == "request_rate", (name, parameter)
            assert parameter.type is not click.FLOAT, (name, parameter)
