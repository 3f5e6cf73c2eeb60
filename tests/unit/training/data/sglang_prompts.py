"""Run as a process: the prompts that SGLang's own chat endpoint makes of requests after the router.

Standard input is JSON: a tokenizer's directory, templates, and requests; standard output has the ids of each template's
requests. A process of its own, because without a GPU importing SGLang needs stubs.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any, get_args

from engine import cpu_support

cpu_support.install()

import msgspec  # noqa: E402
from sglang.srt.entrypoints.openai import protocol  # noqa: E402
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: E402
from sglang.srt.parser.template_manager import TemplateManager  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from router.protocol.messages import Message, changes_for_templates  # noqa: E402


def endpoint_of(tokenizer: Any) -> OpenAIServingChat:
    """The endpoint, with what its constructor takes from a running engine."""
    endpoint = object.__new__(OpenAIServingChat)
    endpoint.tokenizer_manager = SimpleNamespace(
        tokenizer=tokenizer, served_model_name="base", server_args=SimpleNamespace(reasoning_parser=None)
    )
    endpoint.template_manager = TemplateManager()
    endpoint.template_manager._jinja_template_content_format = "string"
    endpoint.default_chat_template_kwargs = endpoint.chat_encoding_spec = endpoint.tool_call_parser = None
    endpoint.reasoning_parser = endpoint._encoding_adapter = endpoint._reasoning_detector = None
    endpoint._prompt_text_round_trip_is_lossy = False
    endpoint.is_gpt_oss = endpoint.is_gemma4 = endpoint.is_minimax_m3 = False
    endpoint._tokenizer_auto_adds_specials = True
    return endpoint


def main() -> None:
    asked = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"], local_files_only=True)
    endpoint = endpoint_of(tokenizer)
    found: dict[str, list[list[int]]] = {}
    for template in asked["templates"]:
        tokenizer.chat_template = template
        endpoint.template_manager._run_template_detection(template, tokenizer)
        for message in (message for each in asked["requests"] for message in each["messages"]):
            known = {name: message[name] for name in Message.__struct_fields__ if name in message}
            message.update(changes_for_templates(msgspec.convert(known, Message)))
        requests = [protocol.ChatCompletionRequest(model="base", **each) for each in asked["requests"]]
        found[template] = [endpoint._process_messages(each, False).prompt_ids for each in requests]
    json.dump({"prompts": found, "roles": get_args(protocol._GenericMessageRole)}, sys.stdout)


if __name__ == "__main__":
    main()
