"""Token ids of contexts and answers, as serving would make them.

A context is what an engine reads for the prompt: a rendered chat template without further special tokens, or a text
with those that the tokenizer adds. An answer is what the engine would have to generate after exactly these ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
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
        *("strftime_now", "tokenizer_kwargs", "tools", "truncation"),
    )
)
_TIME = "strftime_now"  # by which a template asks for the present time
# Tokens at which SGLang ends every answer (sglang/srt/utils/hf_transformers/common.py).
_MORE_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>")
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
    ends: Iterable[int] = ()  # end-of-sequence ids of the model's configuration; the tokenizer's own are added
    date: datetime | None = None  # what templates take for the present time; None: the present time
    _eos: int = field(init=False)
    _ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Raises OptionInvalid for a tokenizer that has no end-of-sequence token."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise OptionInvalid("the tokenizer has no eos_token, so no answer would learn to end; set one in its files")
        added = self.tokenizer.get_added_vocab()
        object.__setattr__(self, "_eos", eos)
        object.__setattr__(
            self, "_ends", frozenset((eos, *self.ends, *(added[each] for each in _MORE_ENDS if each in added)))
        )

    @property
    def is_dated(self) -> bool:
        """The chat template asks for the time, so the ids depend on `date`."""
        return _TIME in str(self.tokenizer.chat_template)

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
        answer, is_ended = self._until_end(self._after(prompt, context, whole, False))
        if not is_ended:
            names = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(sorted(self._ends))))
            raise RowFault(
                f"the chat template ends the answer {_tail(whole[len(prompt) :])} with no end-of-sequence token "
                f"({names}), so it would never end when it is served; add one to the template, or its last token to "
                "eos_token_id in generation_config.json"
            )
        return answer

    def _after(self, prompt: str, context: Ids, whole: str, special: bool) -> Ids:
        """The ids of the text after the prompt: as they continue the prompt's ids where they do, else on their own.

        Tokenizers like Llama 2's put a space before a text's first word, so there it is tokenised after a line's end.
        """
        ids = self._ids(whole, special=special)
        if ids[: len(context)] == context:
            return ids[len(context) :]
        rest, text = whole[len(prompt) :], self._text(ids)
        for before in ("", "\n"):
            leading = self._ids(before, special=False) if before else ()
            found = self._ids(before + rest, special=False)
            after = found[len(leading) :]
            if found[: len(leading)] == leading and self._text((*context, *after)) == text:
                return after
        raise RowFault(
            f"the tokenizer has no ids for the answer {_tail(rest)} after the prompt {_tail(prompt)}; let the answer "
            "begin with a whole word"
        )

    def _until_end(self, answer: Ids) -> tuple[Ids, bool]:
        """The answer up to its first end-of-sequence token, if it has one: generation stops there."""
        for number, token in enumerate(answer):
            if token in self._ends:
                return answer[: number + 1], True
        return answer, False

    def _ended(self, answer: Ids) -> Ids:
        until, is_ended = self._until_end(answer)
        return until if is_ended else (*until, self._eos)

    def _text(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, row: Conversation, *, is_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        time = {} if self.date is None or not self.is_dated else {_TIME: self.date.strftime}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **row.template_arguments,
                **time,
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
