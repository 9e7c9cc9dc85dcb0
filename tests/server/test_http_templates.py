"""Chat templates: what real ones need works, what a hostile one tries does not, and BOS appears once (C1)."""

from __future__ import annotations

import json

import pytest
from server_fakes import BOS, ByteTokenizer, MockEngine, make_state, post

from coterie.server.errors import ApiError
from coterie.server.templates import ChatPrompt, ChatTemplate, TemplateLimits
from coterie.spec.errors import CoterieError

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def render(source: str | None, *, seconds: float = 5.0, chars: int = 100_000, **arguments: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": None}, TemplateLimits(seconds, chars))
    prompt = ChatPrompt([{"role": "user", "content": "hi é<b>"}], True, arguments)
    try:
        return template.render_now(prompt)
    finally:
        template.close()


@pytest.mark.parametrize("source, expected", [
    ("{{ bos_token }}|{{ eos_token }}|", "<s>||"),
    ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "hi é<b>\n"),
    ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% break %}{% endfor %}", "1"),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi é<b>"}'),
    ("{{ messages[0] | tojson(ensure_ascii=True) }}", '{"role": "user", "content": "hi \\u00e9<b>"}'),
    ("{{ messages[0] | tojson(sort_keys=True, separators=(',', ':')) }}", '{"content":"hi é<b>","role":"user"}'),
    ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi é<b>"),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{% set ns = namespace(x=1) %}{% for i in range(3) %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}", "4"),
    ("{{ tools is none }}{{ unknown is defined }}{{ add_generation_prompt }}", "TrueFalseTrue"),
    ("{{ 'ab' * 3 }}{{ 2 ** 8 }}{{ 3 * 4 }}{{ '%s-%d' % ('a', 1) }}", "ababab25612a-1"),
    ("{{ thinking }}", "True"),
])  # fmt: skip
def test_what_real_templates_use(source, expected):
    assert render(source, thinking=True) == expected


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}",
    "{{ 'a' * 10000000000 }}", "{{ 10000000000 * [1] }}", "{{ 9 ** 9 ** 9 }}", "{{ messages | tojson(indent=10**9) }}",
    "{{ nothing.here }}", "{{ 1 / 0 }}", "{{ messages[7].role }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(10**9) | length }}", "{% include 'secret' %}", "{{ raise_exception('no system role') }}",
])  # fmt: skip
def test_hostile_or_failing_templates_are_a_400_with_the_reason(source):
    with pytest.raises(ApiError) as caught:
        render(source)
    assert caught.value.fault.status == 400 and caught.value.fault.param == "messages"
    assert len(caught.value.fault.message) > len("messages: the chat template failed on them: ")


def test_refusal_shows_the_templates_words():
    with pytest.raises(ApiError, match="no system role"):
        render("{{ raise_exception('no system role') }}")


@pytest.mark.parametrize("source", [
    "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(50000) %}{% set x = n %}{% endfor %}{% endmacro %}"
    "{% for i in range(50000) %}{% set x = f(i) %}{% endfor %}",
])  # fmt: skip
def test_loops_that_print_nothing_are_stopped(source):
    with pytest.raises(ApiError, match=r"longer than 0\.2 s"):
        render(source, seconds=0.2)


def test_output_is_capped():
    with pytest.raises(ApiError, match="longer than 1000 characters"):
        render("{% for i in range(100) %}{{ messages[0].content * 10 }}{% endfor %}", chars=1000)


def test_broken_template_is_one_line_at_start():
    with pytest.raises(CoterieError, match="not valid jinja2"):
        render("{% for")
    with pytest.raises(CoterieError, match="cannot read the chat template"):
        make_state(MockEngine(), chat_template="/does/not/exist.jinja")


def test_bos_appears_once_and_all_routes_agree():
    engine = MockEngine()
    shown = post(engine, "/tokenize", HELLO).json()
    post(engine, "/v1/chat/completions", HELLO)
    expected = [BOS, *b"[user]hi[assistant]"]
    assert engine.asked[0][0] == shown["tokens"] == expected
    assert shown["count"] == len(expected) and shown["max_model_len"] == 128


def test_raw_prompts_follow_the_tokenizer():
    engine = MockEngine()
    post(engine, "/v1/completions", {"prompt": "hi"})
    post(engine, "/v1/completions", {"prompt": "hi", "add_special_tokens": False})
    shown = post(engine, "/tokenize", {"prompt": "hi", "return_token_strs": True}).json()
    assert engine.asked[0][0] == shown["tokens"] == [BOS, *b"hi"]
    assert engine.asked[1][0] == list(b"hi")
    assert shown["token_strs"] == ["<s>", "h", "i"]
    assert post(engine, "/detokenize", {"tokens": shown["tokens"]}).json() == {"prompt": "<s>hi"}
    for body in ({}, {"prompt": "a", "messages": HELLO["messages"]}):
        assert post(engine, "/tokenize", body).status_code == 400
    assert post(engine, "/detokenize", {"tokens": [-1]}).json()["error"]["param"] == "tokens"


def test_without_a_template_the_fallback_is_encoded_like_a_raw_prompt():
    engine = MockEngine(tokenizer=ByteTokenizer(chat_template=None))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    post(engine, "/v1/chat/completions", {"messages": messages})
    assert engine.asked[0][0] == [BOS, *b"System: Be brief.\n\nUser: hi\n\nAssistant:"]


def test_parts_roles_and_arguments_reach_the_template(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages | tojson }}{{ thinking }}{{ reasoning_effort }}{{ add_generation_prompt }}")
    engine = MockEngine()
    engine.max_model_len = 10_000
    state = make_state(engine, chat_template=str(file))
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        "chat_template_kwargs": {"thinking": True, "messages": "mine", "bos_token": "x"},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    shown = bytes(post(state, "/tokenize", body).json()["tokens"]).decode()
    messages = [
        {"role": "system", "content": "ab"},
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]  # fmt: skip
    assert shown == json.dumps(messages) + "TruelowFalse"


def test_a_slow_template_leaves_the_server_alive(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}")
    state = make_state(MockEngine(), chat_template=str(file), template_seconds=0.2)
    response = post(state, "/v1/chat/completions", HELLO)
    assert response.status_code == 400 and "0.2 s" in response.json()["error"]["message"]
    assert post(state, "/v1/completions", {"prompt": "hi"}).status_code == 200
