"""What an answer holds: a call that was cut."""

from __future__ import annotations

from engine.hooks.hook import OUR_ROLES, Hook, HookGroup
from engine.hooks.requests import cut_calls

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="Calls that a limit cut",
        upstream="none; a stream closes its arguments",
        remove_when="streams give the arguments up to where the model stopped",
        patch="cut_calls_stay_open",
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
