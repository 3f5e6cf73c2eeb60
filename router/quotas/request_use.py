"""The use of a validated request, for quotas."""

from __future__ import annotations

import re

import msgspec

from router.protocol.field_values import TYPICAL_ANSWER_TOKENS, answer_limit
from router.protocol.request_body import Fields
from router.protocol.validation import ValidatedRequest
from router.quotas.budget import Grammar, Use

_GRAMMAR_FIELDS = ("json_schema", "regex")
_PLAIN = (b'"text"', b'"json_object"')
_FREE_TOOL_CHOICES = (b'"auto"', b'"none"')
_STRICT = re.compile(b'"%b"' % b"".join(rb"(?:%c|\\u%04x)" % (each, each) for each in b"strict"))  # also if escaped


def use_of(validated: ValidatedRequest, prompt_tokens: int) -> Use:
    """The request's use, except of grammars. `prompt_tokens`: the estimate for all of its prompts."""
    sequences = validated.num_choices
    limit = answer_limit(validated.fields)
    each = TYPICAL_ANSWER_TOKENS if limit is None else limit
    return Use(prompt_tokens, sequences * each if validated.generates else 0, sequences)


def most_output_tokens(validated: ValidatedRequest) -> int | None:
    """The most tokens that the answer can have; None: as many as the context has room for."""
    limit = answer_limit(validated.fields)
    each = validated.most_tokens if limit is None else limit
    return None if each is None else validated.num_choices * each


def grammar_of(fields: Fields) -> Grammar | None:
    """The grammar that an engine compiles for a request; None if there is none."""
    parts = [bytes(fields[name]) for name in _GRAMMAR_FIELDS if name in fields]
    if "response_format" in fields:
        kind = bytes(msgspec.json.decode(fields["response_format"], type=dict[str, msgspec.Raw]).get("type", b""))
        if kind != _PLAIN[0]:
            parts.append(kind if kind == _PLAIN[1] else bytes(fields["response_format"]))
    if "tools" in fields:
        tools, choice = bytes(fields["tools"]), bytes(fields.get("tool_choice", _FREE_TOOL_CHOICES[0]))
        if choice not in _FREE_TOOL_CHOICES or _STRICT.search(tools):
            parts += [tools, choice]
    return Grammar(hash(tuple(parts)), sum(map(len, parts))) if parts else None
