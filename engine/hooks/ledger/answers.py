"""What an answer holds: the spacing of its calls, a call that was cut."""

from __future__ import annotations

from engine.hooks.hook import OUR_ROLES, Hook, HookGroup
from engine.hooks.requests import cut_calls, whitespace

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="Calls of tools without endless whitespace, and nothing after those that are required",
        upstream="--constrained-json-disable-any-whitespace is for JSON schemas; xgrammar's tags have no such option",
        remove_when="that option also reaches structural tags, and required calls admit no text",
        hooks=(
            Hook(
                name="structural_tags_have_no_whitespace",
                target="xgrammar.compiler.GrammarCompiler.compile_structural_tag",
                fn=whitespace.leave_out_whitespace,
                roles=OUR_ROLES,
                source_sha256="d684fa95a93ead9c2d21bb777065b1f9d495c4baf3f499b71bf4000dc9e916f8",
                why="a small model that may write whitespace in a call or text after it does so to the length limit",
            ),
        ),
    ),
    HookGroup(
        lacking="Calls that a limit cut",
        upstream="none; a stream closes its arguments",
        remove_when="streams give the arguments up to where the model stopped",
        hooks=(
            Hook(
                name="cut_calls_stay_open",
                target="sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._check_for_unstreamed_tool_args",
                fn=cut_calls.finish_calls,
                roles=OUR_ROLES,
                source_sha256="d92909fef0cb1834eb914c846f5527ba06d35bff20a0b3ecb6abbed66941b14e",
                why="a client would take a closed object for what the model wrote",
            ),
        ),
    ),
)
