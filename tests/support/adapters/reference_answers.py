"""What an adapter must answer: plain float32 with transformers and peft, against which engines are tested.

The whole prompt, its last token included, is read with the adapter. Decoding is greedy and uses base weights (or, for
positions "all", the adapter) over the same KV cache. End-of-sequence tokens do not stop it. peft itself runs a PEFT
LoRA directory, so that the result does not depend on Prelude's reader.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.formats import read_adapter
from adapters.formats.peft.config import CONFIG_NAME, OUR_KEY
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, Positions
from adapters.verification.reference import UNLIMITED, adapted, load_model, peft_adapted


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """The expected answer to one request."""

    tokens: list[int]  # chosen greedily, or as given
    logprobs: list[float]  # of each of them
    prompt_logprobs: list[float | None]  # log p(token i | tokens before i); None for the first
    embedding: list[float]  # [hidden_size]: the last hidden state of the prompt after the final norm, of length 1
    method: str  # "base", "peft" or "normal_form"


def answer(
    model: Any,
    adapter: Adapter | None,
    prompt_ids: Sequence[int],
    to_answer: int | Sequence[int],
    positions: Positions | None = None,
) -> ReferenceAnswer:
    """The answer under an adapter in normal form; for None, the base model's. `positions` overrides the adapter's.

    `to_answer`: how many tokens to choose greedily, or which tokens to score.
    """
    if adapter is None:
        return _generate(model, prompt_ids, to_answer, nullcontext, nullcontext, "base")

    def on() -> AbstractContextManager[None]:
        return adapted(model, adapter)

    everywhere = (positions or adapter.positions) == "all"
    return _generate(model, prompt_ids, to_answer, on, on if everywhere else nullcontext, "normal_form")


def answer_from_directory(
    model: Any,
    directory: Path,
    prompt_ids: Sequence[int],
    to_answer: int | Sequence[int],
    positions: Positions | None = None,
) -> ReferenceAnswer:
    """The answer under the adapter in a directory: by peft if it reads all of it, else from its normal form."""
    if (directory / CONFIG_NAME).exists():
        with peft_adapted(model, directory) as peft_model:
            if peft_model is not None:
                own = json.loads((directory / CONFIG_NAME).read_text()).get(OUR_KEY, {}).get("positions")
                off = peft_model.disable_adapter if (positions or own) == "prefill" else nullcontext
                return _generate(peft_model, prompt_ids, to_answer, nullcontext, off, "peft")
    adapter = read_adapter(directory, BaseModel.read(model.config.name_or_path), UNLIMITED)
    return answer(model, adapter, prompt_ids, to_answer, positions)


@torch.inference_mode()
def _generate(
    model: Any,
    prompt_ids: Sequence[int],
    to_answer: int | Sequence[int],
    while_reading: Callable[[], AbstractContextManager[Any]],
    while_decoding: Callable[[], AbstractContextManager[Any]],
    method: str,
) -> ReferenceAnswer:
    from transformers import DynamicCache

    prompt = torch.tensor([list(prompt_ids)])
    cache = DynamicCache()
    with while_reading(), _input_of(model.get_output_embeddings()) as states:
        logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[0].float()
    embedding = torch.nn.functional.normalize(states[0][0, -1].float(), dim=-1).tolist()
    read = torch.log_softmax(logits, dim=-1)
    following = prompt[0, 1:].unsqueeze(1)
    prompt_logprobs: list[float | None] = [None, *read[:-1].gather(1, following).squeeze(1).tolist()]
    tokens: list[int] = []
    logprobs: list[float] = []
    with while_decoding():
        row = read[-1]
        num_tokens = to_answer if isinstance(to_answer, int) else len(to_answer)
        while len(tokens) < num_tokens:
            tokens.append(int(row.argmax()) if isinstance(to_answer, int) else to_answer[len(tokens)])
            logprobs.append(float(row[tokens[-1]]))
            if len(tokens) < num_tokens:
                step = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
                row = torch.log_softmax(step.logits[0, -1].float(), dim=-1)
    return ReferenceAnswer(tokens, logprobs, prompt_logprobs, embedding, method)


@contextmanager
def _input_of(module: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what a module reads inside the block: the output layer reads the hidden states after the final norm."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def answer_requests(model_dir: str, requests: Path, answered: Path) -> None:
    """Answer a JSON list of {"adapter": DIR or null, "prompt_ids": […], "max_new_tokens": n, "positions": …}.

    Without `positions` the adapter's own apply. `answer_ids` in place of `max_new_tokens` scores those tokens.
    """
    model, answers = load_model(model_dir), []
    for request in json.loads(requests.read_text()):
        to_answer = request["answer_ids"] if "answer_ids" in request else request["max_new_tokens"]
        rest = (request["prompt_ids"], to_answer, request.get("positions"))
        if request.get("adapter") is None:
            answers.append(answer(model, None, *rest))
        else:
            answers.append(answer_from_directory(model, Path(request["adapter"]), *rest))
    answered.write_text(json.dumps([asdict(each) for each in answers]))
