"""Token ids of contexts and answers, as serving would make them.

A context is what an engine reads for the prompt: a rendered chat template without further special tokens, or a text
with those that the tokenizer adds. An answer is what the engine would have to generate after exactly these ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.data.columns import Conversation, Message, TextTurn
from training.data.jsonl import RowFault
from training.data.served_messages import served_context, served_message, served_tools
from training.errors import OptionInvalid

Ids = tuple[int, ...]
KeptIds = Sequence[int]  # a tuple, or for whole files an array of four bytes each

# Arguments of `apply_chat_template` itself, which would reach past the template.
_RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    )
)
# What templates, which are programs of a model's author, fail with on messages that they do not expect.
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Turn:
    """A context and the answers after it: one for SFT, the chosen and the rejected one for preferences."""

    context: KeptIds
    answers: tuple[KeptIds, ...]

    def compact(self) -> Turn:
        """The same in a ninth of the memory."""
        return Turn(array("I", self.context), tuple(array("I", answer) for answer in self.answers))


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns texts and conversations into ids, by a transformers tokenizer and its chat template."""

    tokenizer: Any
    _eos: int = field(init=False)

    def __post_init__(self) -> None:
        """Raises OptionInvalid for a tokenizer that has no end-of-sequence token."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise OptionInvalid("the tokenizer has no eos_token, so no answer would learn to end; set one in its files")
        object.__setattr__(self, "_eos", eos)

    def turns(self, row: TextTurn | Conversation) -> Iterator[Turn]:
        """The row's turns, in order. Raises RowFault."""
        if isinstance(row, TextTurn):
            context = self._ids(row.prompt, special=True)
            answers = (self._ended(self._after(row.prompt, context, row.prompt + each, True)) for each in row.answers)
            yield _checked(Turn(context, tuple(answers)))
            return
        if reserved := sorted(_RESERVED & row.template_arguments.keys()):
            raise RowFault(f"`chat_template_kwargs` has {reserved[0]!r}, which is no variable of a chat template")
        if not self.tokenizer.chat_template:
            raise RowFault("it has messages, but the tokenizer has no chat template; use texts or another tokenizer")
        tools = served_tools(row.tools)
        for turn in row.turns:
            messages = served_context(turn.context)
            prompt = self._render(messages, tools, row, is_prompt=True)
            context = self._ids(prompt, special=False)
            wholes = (
                self._render([*messages, served_message(each)], tools, row, is_prompt=False) for each in turn.answers
            )
            answers = (self._chat_answer(prompt, context, whole) for whole in wholes)
            yield _checked(Turn(context, tuple(answers)))

    def _chat_answer(self, prompt: str, context: Ids, whole: str) -> Ids:
        if not whole.startswith(prompt):
            raise RowFault(
                f"the chat template renders the prompt {_tail(prompt)}, which is no prefix of the conversation with "
                "its answer, so the model would be trained after another prompt than it gets; change the template"
            )
        answer = self._after(prompt, context, whole, False)
        # Generation stops at the end-of-sequence token; what a template writes behind it is never generated.
        ends = [number for number, token in enumerate(answer) if token == self._eos]
        return answer[: ends[-1] + 1] if ends else answer

    def _after(self, prompt: str, context: Ids, whole: str, special: bool) -> Ids:
        """The ids of the text after the prompt: as they continue the prompt's ids where they do, else on their own."""
        ids = self._ids(whole, special=special)
        if ids[: len(context)] == context:
            return ids[len(context) :]
        return self._ids(whole[len(prompt) :], special=False)

    def _ended(self, answer: Ids) -> Ids:
        return answer if answer[-1:] == (self._eos,) else (*answer, self._eos)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, row: Conversation, *, is_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=is_prompt, **row.template_arguments
            )
        except (TemplateError, *_FAILURES) as error:
            if tools and "function" in tools[0]:  # as SGLang, which then tries the functions alone
                return self._render(messages, [tool["function"] for tool in tools], row, is_prompt=is_prompt)
            raise RowFault(f"the chat template refuses it: {str(error)[:200] or type(error).__name__}") from error

    def _ids(self, text: str, *, special: bool) -> Ids:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowFault(
                f"half a surrogate pair ({text[error.start]!r}), which is no character; correct it"
            ) from None
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])


def _checked(turn: Turn) -> Turn:
    if not turn.context:
        raise RowFault("no context: the prompt has no tokens")
    if not all(turn.answers):
        raise RowFault("an empty answer: it has no tokens")
    return turn


def _tail(text: str) -> str:
    return repr(text if len(text) < 60 else f"…{text[-60:]}")
