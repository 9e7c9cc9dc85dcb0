"""Structured output: what a request wants its answer to be, as the grammar that the engine enforces.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields; at most one of them. Whether a
schema can be used is the engine's to say (`engine.grammar_check`); it says so under the field's name. Not here: forced
tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coterie.engine import grammar_text
from coterie.server.errors import bad_request, not_supported
from coterie.server.protocol import ResponseFormat, SamplingFields, StructuredOutputs


@dataclass(frozen=True, slots=True)
class Structure:
    """A grammar and the field that asks for it."""

    grammar: str
    field: str


def wanted_structure(request: SamplingFields) -> Structure | None:
    """What the request's fields ask for, or a 400 that names the one at fault."""
    found = [
        *_response_format(request.response_format),
        *_structured_outputs(request.structured_outputs),
        *_constraint("guided_json", request.guided_json, _schema_grammar),
        *_constraint("guided_regex", request.guided_regex, _regex_grammar),
        *_constraint("guided_choice", request.guided_choice, _choice_grammar),
        *_constraint("guided_grammar", request.guided_grammar, _own_grammar),
    ]
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise bad_request(f"{found[1].field}: {names} exclude each other; send one", param=found[1].field)
    return found[0] if found else None


def _response_format(wanted: ResponseFormat | None) -> list[Structure]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Structure(grammar_text.json_schema(grammar_text.ANY_OBJECT), "response_format")]
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise bad_request("response_format.json_schema: an object with name and schema is required",
                              param="response_format.json_schema")  # fmt: skip
        schema = grammar_text.ANY_OBJECT if wanted.json_schema.schema is None else wanted.json_schema.schema
        return [Structure(grammar_text.json_schema(schema), "response_format.json_schema.schema")]
    if wanted.type in ("structural_tag", "grammar"):
        message = f"type {wanted.type!r} is not supported; use text, json_object or json_schema"
        raise not_supported("response_format", message)
    message = f"response_format.type: {wanted.type[:50]!r} is unknown; use text, json_object or json_schema"
    raise bad_request(message, param="response_format.type")


def _structured_outputs(wanted: StructuredOutputs | None) -> list[Structure]:
    if wanted is None:
        return []
    any_object = grammar_text.ANY_OBJECT if wanted.json_object else None
    return [
        *_constraint("structured_outputs.json", wanted.json, _schema_grammar),
        *_constraint("structured_outputs.json_object", any_object, _schema_grammar),
        *_constraint("structured_outputs.regex", wanted.regex, _regex_grammar),
        *_constraint("structured_outputs.choice", wanted.choice, _choice_grammar),
        *_constraint("structured_outputs.grammar", wanted.grammar, _own_grammar),
    ]


def _constraint(field: str, value: Any, grammar: Any) -> list[Structure]:
    return [] if value is None else [Structure(grammar(value, field), field)]


def _schema_grammar(schema: Mapping[str, Any] | str, field: str) -> str:
    """A schema may also be sent as JSON in a string."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise bad_request(f"{field}: the string is not a JSON object: {error}", param=field) from error
    return grammar_text.json_schema(schema)


def _regex_grammar(pattern: str, field: str) -> str:
    return grammar_text.regex(pattern)


def _choice_grammar(options: Sequence[str], field: str) -> str:
    if not options:
        raise bad_request(f"{field}: a list of at least one string is required", param=field)
    return grammar_text.choice(options)


def _own_grammar(grammar: str, field: str) -> str:
    return grammar
