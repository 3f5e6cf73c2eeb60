"""Creates a demo: a model, adapters and a cluster.yaml, to try a cluster with.

The model is a small pretrained one (pretrained.py), with adapters that were trained for its prompts (samples/demo). The
toy has random weights: its answers are meaningless, but each adapter gives its own, always the same.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ConfigError, StartError
from cluster.local.gpus import list_gpus

MODEL_NAME = "demo"
RANDOM_ADAPTERS = ("a0", "a1", "a2", "a3")
_VOCABULARY = 1024
_CPU_HIDDEN = 128
_GPU_HIDDEN = 512  # heads of 64: kernels for GPUs take none of 16
# Kernels that Triton compiles, so that a host needs a C compiler, and no CUDA toolkit for these.
_GPU_ARGUMENTS = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEMPLATE = (
    "{%- if tools %}<|system|>You may call: {% for tool in tools %}{{ tool | tojson }} {% endfor %}<|end|>{% endif -%}"
    "{%- for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}<|end|>{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
# The tokenizer is trained on this text, so that the model's answers are words.
_TEXT = """
A model that has read the whole library still speaks with one voice. An adapter is a small lesson that changes the
voice without changing the library. When the lesson is heard only while the question is read, the answer keeps its
colour, because every word that follows looks back at what the question became. Some lessons are about law, some about
medicine, some about poetry, rivers, mountains, weather, music, bread, ships, gardens, winter, summer, markets, trains,
letters and lighthouses. A thousand people bring a thousand lessons, and the reader of questions learns each of them for
a moment; the writer of answers learns none, and so can write for all of them at once. The morning was quiet and the
harbour was full of boats. Somebody opened a window, somebody closed a book, somebody counted the lamps along the road
from the old bridge to the new station. We think that good tools are simple, that simple tools are kind, and that kind
tools are worth the work. Please tell me about the sea. Hello, how are you today? Write a short story for my daughter.
What is the capital of the country where the tallest trees grow? Count from one to ten, then back again, slowly.
"""


def make_demo(folder: Path, file: Path | None = None, device: str = "cpu", *, is_unified: bool = False) -> Path:
    """Create model/, adapters/ and cluster.yaml in the folder unless it has them. Returns cluster.yaml's path.

    `file`: the model (`pretrained_file`), whose rows in data/ come along; None: the toy, in seconds. `device`: "cuda"
    for the GPUs of this host. `is_unified`: one unified worker instead of a pair. Raises StartError if there is no GPU,
    and ConfigError for a folder that has other files or cannot be made.
    """
    config = folder / "cluster.yaml"
    if config.exists():
        return config
    num_gpus = count_gpus(device)
    with made_whole(folder) as partial:
        names = _fill_with_toy(partial, num_gpus) if file is None else _fill(partial, file, is_unified)
        described = demo_config(num_gpus, names, is_unified=is_unified)
        (partial / "cluster.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    return config


def _fill(folder: Path, file: Path, is_unified: bool) -> Iterable[str]:
    """Write the pretrained model, its adapters, of which one needs unified workers, and their rows."""
    from cluster.local.pretrained import read_pretrained
    from samples.demo import ADAPTERS, FOLDER, FOR_ALL_POSITIONS

    # The README says what each adapter answers. At temperature 0 Hugging Face's generate would refuse the model.
    save_model(*read_pretrained(file), folder / "model", {"do_sample": True, "temperature": 0.01})
    shutil.copytree(FOLDER / "data", folder / "data")
    names = (*ADAPTERS, FOR_ALL_POSITIONS) if is_unified else ADAPTERS
    for name in names:
        shutil.copytree(FOLDER / "adapters" / name, folder / "adapters" / name)
    return names


def _fill_with_toy(folder: Path, num_gpus: int) -> Iterable[str]:
    """Write a model and adapters with random weights."""
    make_model(folder / "model", hidden=_GPU_HIDDEN if num_gpus else _CPU_HIDDEN)

    from adapters.model.base_model import BaseModel
    from samples.random_adapters import write_random_lora

    base = BaseModel.read(folder / "model")
    for number, name in enumerate(RANDOM_ADAPTERS):
        write_random_lora(folder / "adapters" / name, base, seed=number)
    return RANDOM_ADAPTERS


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the block ends without an error.

    Raises ConfigError if that has files, which are somebody's, or if it cannot be made.
    """
    folder = folder.resolve()
    partial = folder.with_name(folder.name + ".partial")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} has files that are no demo; name a folder that is not there yet, or is empty")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
    yield partial
    partial.rename(folder)  # in the place of an empty one, too


def demo_config(num_gpus: int = 0, adapters: Iterable[str] = RANDOM_ADAPTERS, *, is_unified: bool = False) -> dict:
    """A cluster.yaml with a pair, on the CPU, both on one GPU, or each on its own; or with a unified worker."""
    engine: dict = {"device": "cpu", "max_total_tokens": 16384, "max_running_requests": 32}
    worker = {}
    roles = ("unified",) if is_unified else ("prefill", "decode")
    if num_gpus:
        engine |= {"device": "cuda", "extra_arguments": list(_GPU_ARGUMENTS)}
        worker = {"gpus": 1} if num_gpus > 1 else {}
    return {
        "model": {
            "path": "model",
            "name": MODEL_NAME,
            "dtype": "bfloat16" if num_gpus else "float32",
            "tool_call_parser": "qwen25",
        },
        "engine": {**engine, "chunked_prefill_tokens": 256},
        "router": {"management": True, "console": True},  # the router listens on localhost only
        "workers": {f"{role}-0": {"role": role, **worker} for role in roles},
        "adapters": {name: {"path": f"adapters/{name}"} for name in adapters},
    }


def count_gpus(device: str) -> int:
    """GPUs of this host, if the device is "cuda". Raises StartError if it has none."""
    if device != "cuda":
        return 0
    gpus = list_gpus(os.environ)
    if not gpus.gpus:
        raise StartError(
            f"no GPU was found ({gpus.note or 'nvidia-smi lists none'}); `make DEVICE=cpu serve` needs none"
        )
    return len(gpus.gpus)


def make_model(folder: Path, *, hidden: int = _CPU_HIDDEN, num_layers: int = 4, seed: int = 0) -> None:
    """Write a Llama with random weights, and its tokenizer, as a Hugging Face directory."""
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(tokenizer, hidden, num_layers))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.08)
        # Favour words over single bytes and special tokens.
        words = [len(tokenizer.decode([token]).strip()) > 2 for token in range(len(tokenizer))]
        words[: len(_SPECIAL)] = [False] * len(_SPECIAL)
        model.lm_head.weight[~torch.tensor(words)] *= 0.25
    save_model(model, tokenizer, folder)


def llama_config(tokenizer: Any, hidden: int, num_layers: int) -> Any:
    """A Llama's configuration, for transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )


def save_model(model: Any, tokenizer: Any, folder: Path, sampling: Mapping[str, Any] | None = None) -> None:
    """Write a Hugging Face directory. `sampling`: what requests get that do not say, else SGLang's, temperature 1."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers would write sampling defaults of its own.
    defaults = {"eos_token_id": tokenizer.eos_token_id, **(sampling or {})}
    (folder / "generation_config.json").write_text(json.dumps(defaults))


def make_tokenizer() -> Any:
    """A tokenizer whose words are those of `_TEXT`; it reads any other text byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_to_words = Tokenizer(models.BPE())
    bytes_to_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_to_words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        min_frequency=1,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bytes_to_words.train_from_iterator([_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_to_words, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
