"""soak.py: half a minute of mixed traffic balances every book; and books that do not balance are seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from soak import Body, Check, Counters, checks, counter_checks
from soak_traffic import HANG_UP_TOKENS, Ledger

from coterie.loadgen.client import CHAT, TEXT

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_half_a_minute() -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "0.4", "--rate", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 checks failed" in result.stdout
    assert result.stdout.count("\nok ") >= 12


def ledger() -> Ledger:
    """Three whole answers, one stream left, one hang-up before an answer."""
    found = Ledger()
    found.sent.update({"chat": 3, "left": 2})
    for reason in ("stop", "length", "length"):
        found.count("chat", [reason], 10, 5)
    found.statuses[CHAT, 200] = 3
    found.statuses[TEXT, 200] = found.streams_left = found.hidden[TEXT] = 1
    found.hung_up["left"] = 2
    found.seen_prompt, found.seen_output, found.may_follow = 7, 2, 60
    return found


def metrics(**changes: float) -> str:
    """What /metrics must say of that, the hang-up seen by the engine."""
    values = {
        "prompt_tokens_total": 37.0 + HANG_UP_TOKENS, "request_prompt_tokens_sum": 37.0 + HANG_UP_TOKENS,
        "generation_tokens_total": 20.0, "request_generation_tokens_sum": 20.0, "request_prompt_tokens_count": 5.0,
        "e2e_request_latency_seconds_count": 5.0, "time_to_first_token_seconds_count": 4.0,
    } | changes  # fmt: skip
    lines = [f'coterie:{name}{{model_name="m"}} {value}' for name, value in values.items() if "{" not in name]
    reasons = {"stop": 1.0, "length": 2.0, "abort": 2.0, "error": 0.0}
    for reason, value in reasons.items():
        value = changes.get("{" + reason, value)
        lines.append(f'coterie:request_success_total{{finished_reason="{reason}",model_name="m"}} {value}')
    answers = {(TEXT, 200): 1.0, (TEXT, 499): 1.0, (CHAT, 200): changes.get("{chat", 3.0)}
    lines += [f'coterie:http_requests_total{{path="{p}",status="{s}"}} {v}' for (p, s), v in answers.items()]
    return "\n".join(["# HELP coterie:x y", *lines])


def failed(found: list[Check]) -> list[str]:
    return [check.what for check in found if not check.holds]


def test_books_that_balance() -> None:
    assert failed(list(counter_checks(ledger(), Counters(metrics())))) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt_tokens_total": 38.0 + HANG_UP_TOKENS}, ["prompt_tokens_total", "histograms"]),
        ({"generation_tokens_total": 16.0, "request_generation_tokens_sum": 16.0}, ["generation_tokens_total"]),
        ({"generation_tokens_total": 78.0, "request_generation_tokens_sum": 78.0}, ["generation_tokens_total"]),
        ({"{stop": 0.0, "{abort": 3.0}, ["request_success_total"]),
        ({"{error": 1.0, "{abort": 1.0}, ["request_success_total"]),
        ({"{chat": 4.0}, [f"http_requests_total of {CHAT}"]),
        ({"{chat": 2.0}, [f"http_requests_total of {CHAT}"]),
        ({"time_to_first_token_seconds_count": 6.0}, ["histograms"]),
        ({"e2e_request_latency_seconds_count": 6.0}, ["histograms"]),
    ],
)
def test_books_that_do_not_balance(changes: dict[str, float], what: list[str]) -> None:
    assert failed(list(counter_checks(ledger(), Counters(metrics(**changes))))) == what


def body(growth: float) -> Body:
    """An hour in which memory rises by `growth` bytes."""
    return Body([(60.0 * i, 1e8 + growth * i / 60) for i in range(61)], [10, 60, 10], [9, 12, 9])


def test_what_is_left_behind_is_seen() -> None:
    def names(**given: object) -> list[str]:
        values = {"lost": 0, "text": metrics(), "body": body(0.0), "ending": (0, ""), "ledger": ledger()} | given
        values["ledger"].statuses[CHAT, 429] = 1  # type: ignore[attr-defined]
        text = str(values["text"]) + f'\ncoterie:http_requests_total{{path="{CHAT}",status="429"}} 1'
        return failed(list(checks(values["ledger"], values["lost"], Counters(text), values["body"], values["ending"])))  # type: ignore[arg-type]

    assert names() == []
    assert names(lost=1) == ["no request lost"]
    assert names(body=body(5e7)) == ["memory is flat"]
    assert names(body=body(2e6)) == []
    assert names(ending=(1, "exit code 1")) == ["the server ended cleanly"]
    assert names(text=metrics(num_requests_running=1.0)) == ["no block and no request left"]
    assert names(text=metrics(kv_cache_usage_perc=0.01)) == ["no block and no request left"]
    leaking = body(0.0)
    leaking.files[-1] = 40
    assert names(body=leaking) == ["descriptors and threads"]
    wrong = ledger()
    wrong.note("chat", "the answer changed")
    assert names(ledger=wrong) == ["no unexpected end"]
    lost = ledger()
    lost.sent["chat"] += 1
    assert names(ledger=lost) == ["no request lost"]


def test_an_answer_that_changed_is_noted() -> None:
    found = Ledger()
    found.same_text("chat", "who", "I")
    found.same_text("chat", "who", "I")
    assert not found.unexpected
    found.same_text("chat", "who", "you")
    assert found.unexpected == ["chat: the answer to 'who' changed"]
