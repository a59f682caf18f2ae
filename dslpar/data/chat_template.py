"""Conversations as text, by a Jinja template, and which of it the assistant says.

    render = Renderer(template_of(data, job.path), answers_only=True)
    render(conversation)                  # Rendered("<|im_start|>user\\n...", [(42, 57)])

Jinja runs as transformers' apply_chat_template runs it. Where the template marks answers ({% generation %}), these are
they, as there. Else an answer is what the conversation up to it has more than the one before it with the prompt for an
answer, which is how TRL and axolotl tell them; a template for which that does not hold is refused, not guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from dslpar.schema.chat_templates import Template
from dslpar.schema.conversations import ASSISTANT, Conversation

_OF_TEMPLATES = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What a template's code raises of a conversation that it was not written for."""
Span = tuple[int, int]
"""Characters from, and up to."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[Span]
    """What is learned."""


_CLOCK = "strftime_now"
_NO_CLOCK = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""For templates that write the day's date, Llama 3.1's default: a resume on another day is to have the same text."""


class TemplateProblemError(ValueError):
    """A template cannot be used at all; of a single conversation it is a ValueError."""


class Renderer:
    """Writes conversations as text; `special` are texts of tokens that end an answer, and stand for no text."""

    def __init__(self, template: Template, answers_only: bool, special: Iterable[str] = ()) -> None:
        self.template, self.answers_only = template, answers_only
        self._text = (_NO_CLOCK if _CLOCK in template.text else "") + template.text
        self.special = tuple({*special, *filter(None, template.special.values())})

    def __call__(self, conversation: Conversation) -> Rendered:
        """Return a conversation's text.

        Raises:
            TemplateProblemError: the template is none, or does not tell what the assistant says.
            ValueError: the template refuses this conversation.
        """
        marks = self.answers_only and self.template.marks_answers
        text, spans = self._run(conversation, marks=marks)
        if not self.answers_only:
            return Rendered(text, [(0, len(text))])
        return Rendered(text, spans if marks else self._by_prefixes(conversation, text))

    def prompt(self, conversation: Conversation) -> str:
        """Return a conversation's text up to where the assistant is to answer.

        Raises:
            TemplateProblemError, ValueError: as for the whole.
        """
        return self._run(conversation, prompt=True)[0]

    def _by_prefixes(self, conversation: Conversation, whole: str) -> list[Span]:
        found = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._run(conversation, index, prompt=True)[0]
            after = self._run(conversation, index + 1)[0]
            if not after.startswith(before) or not whole.startswith(after):
                which = "the prompt for it" if not after.startswith(before) else "the turns after it"
                raise TemplateProblemError(f"message {index + 1}, an answer, is written otherwise with {which}")
            found.append((len(before), self._end(after, len(before))))
        return found

    def _end(self, text: str, begin: int) -> int:
        """Return where an answer ends: line breaks after its end token are the template's, and nobody says them."""
        kept = text[begin:].rstrip()
        return begin + len(kept) if kept.endswith(self.special) else len(text)

    def _run(
        self, of: Conversation, stop: int | None = None, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of the first `stop` messages, and what the template marks."""
        try:
            rendered: Any = render_jinja_template(
                [of.messages[:stop]],
                tools=of.tools,
                chat_template=self._text,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **dict[str, Any](self.template.special),
            )
        except TemplateSyntaxError as error:
            raise TemplateProblemError(f"line {error.lineno} of the template: {error.message}") from error
        except _OF_TEMPLATES as error:
            raise ValueError(f"the template says: {error}") from error
        # Half of a surrogate pair, which JSON can hold, is no text: one character for one, so that spans stay.
        (text,), spans = rendered
        return text.encode("utf-8", "replace").decode(), list(spans[0]) if marks else []
