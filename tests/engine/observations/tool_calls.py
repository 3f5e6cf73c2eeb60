"""What SGLang makes of calls of tools and of end tokens with the id 0, for `hooks_in_action.py`."""

from __future__ import annotations

import json
from types import SimpleNamespace

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CALL = '<call>{"city": "Rome"}</call>'


def observed() -> dict[str, list[object]]:
    """By hook: which calls a grammar takes (with tabs, two, with text after them); an answer that ended in 0."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    manager = SimpleNamespace(is_tool_call_parser_gpt_oss=False)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(eos_token_id=2), hf_generation_config=SimpleNamespace(eos_token_id=0)
    )
    return {
        "structural_tags_have_no_whitespace": [
            takes(CALL),
            takes('<call>{"city"\t:"Rome"\t\t}</call>'),
            takes(f"{CALL}\n{CALL}", at_least_one=True),
            takes(f"{CALL} And", at_least_one=True),
            takes(f"{CALL} And"),
        ],
        "end_token_0_is_trimmed": [
            DetokenizerManager.trim_matched_stop(manager, [5, 0], {"type": "stop", "matched": 0}, no_stop_trim)
            for no_stop_trim in (False, True)
        ],
        "answers_end_at_token_0": sorted(ModelConfig._get_hf_eos_token_id(model)),
    }


def takes(answer: str, *, at_least_one: bool = False) -> bool:
    """Whether the grammar of calls takes the answer. `at_least_one`: as SGLang has it where a call is required."""
    from xgrammar import GrammarCompiler, GrammarMatcher, StructuralTag, StructuralTagItem, TokenizerInfo

    compiler = GrammarCompiler(TokenizerInfo([chr(code) for code in range(128)], stop_token_ids=[0]))
    item = StructuralTagItem(begin="<call>", schema=json.dumps(SCHEMA), end="</call>")
    tag = StructuralTag.from_legacy_structural_tag([item], ["<call>"])
    tag.format.at_least_one = at_least_one
    return GrammarMatcher(compiler.compile_structural_tag(tag)).accept_string(answer)
