"""What an answer holds: the spacing of its calls, its last token, a call that was cut."""

from __future__ import annotations

from engine.hooks.hook import OUR_ROLES, Hook, HookGroup
from engine.hooks.requests import cut_calls, tokens, whitespace

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
                source_sha256="2ad4e4495c68efc2f278f61aad27ec328f1f7d39718aecd39de475035e76324d",
                why="a client would take a closed object for what the model wrote",
            ),
        ),
    ),
    HookGroup(
        lacking="End tokens with the id 0",
        upstream="none; DetokenizerManager.trim_matched_stop and ModelConfig take the id 0 for no token",
        remove_when="they compare the id with None",
        hooks=(
            Hook(
                name="end_token_0_is_trimmed",
                target="sglang.srt.managers.detokenizer_manager.DetokenizerManager.trim_matched_stop",
                fn=tokens.trim_token_0,
                roles=OUR_ROLES,
                source_sha256="bf9541d96ce220a377a47b2809050c0ece8e5973fba7b7a988941162d4edfce8",
                why="answers with tools, or with skip_special_tokens false, would end in the text of that token",
            ),
            Hook(
                name="answers_end_at_token_0",
                target="sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id",
                fn=tokens.end_at_token_0,
                roles=OUR_ROLES,
                source_sha256="da5621ae3c7ad81574c3c250eb7cd726597a95b363d6fccdb3d7e1e0779c0d90",
                why="an end token 0 that only generation_config.json names would not end an answer",
            ),
        ),
    ),
)
