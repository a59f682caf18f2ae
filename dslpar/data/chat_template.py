"""Render conversations to text with a Jinja template, and find the assistant's answers in it.

    render = Renderer(template_of(data, job.path), answers_only=True)
    render(conversation)                  # Rendered("<|im_start|>user\\n...", [(42, 57)])

Jinja runs as in transformers' apply_chat_template. If the template marks answers ({% generation %}), the marks are
used, as in transformers. Otherwise two renderings are compared for each answer, as in TRL and axolotl. One has all
messages up to and including the answer. The other has the messages before the answer and the generation prompt. The
answer is the text that only the first rendering has. If the second rendering is not a prefix of the first, the template
is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from dslpar.schema.chat_templates import Template
from dslpar.schema.conversations import ASSISTANT, Conversation

_OF_TEMPLATES = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Exceptions that a template's code raises for a conversation that it does not support."""
Span = tuple[int, int]
"""(First character, end)."""


class Rendered(NamedTuple):
    """Text of a conversation."""

    text: str
    spans: list[Span]
    """The spans of the text that are learned."""


_CLOCK = "strftime_now"
_NO_CLOCK = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""A fixed date, Llama 3.1's default, for templates that write today's date, so that a resume has the same text."""


class TemplateProblemError(ValueError):
    """The template is unusable for every conversation. A problem with one conversation is a plain ValueError."""


class Renderer:
    """Renderer of conversations to text; `special` are the texts of special tokens, which can end an answer."""

    def __init__(self, template: Template, answers_only: bool, special: Iterable[str] = ()) -> None:
        self.template, self.answers_only = template, answers_only
        self._text = (_NO_CLOCK if _CLOCK in template.text else "") + template.text
        self.special = tuple({*special, *filter(None, template.special.values())})

    def __call__(self, conversation: Conversation) -> Rendered:
        """Return a conversation's text.

        Raises:
            TemplateProblemError: the template is no valid Jinja, or the assistant's answers cannot be found.
            ValueError: the template refuses this conversation.
        """
        marks = self.answers_only and self.template.marks_answers
        text, spans = self._run(conversation, marks=marks)
        if not self.answers_only:
            return Rendered(text, [(0, len(text))])
        return Rendered(text, spans if marks else self._by_prefixes(conversation, text))

    def prompt(self, conversation: Conversation) -> str:
        """Return a conversation's text with the generation prompt for the assistant's next answer.

        Raises:
            TemplateProblemError, ValueError: as for a call.
        """
        return self._run(conversation, prompt=True)[0]

    def _by_prefixes(self, conversation: Conversation, whole: str) -> list[Span]:
        """Return the spans of the answers, found by comparing two renderings for each answer."""
        found = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._run(conversation, index, prompt=True)[0]
            after = self._run(conversation, index + 1)[0]
            if not after.startswith(before) or not whole.startswith(after):
                which = "it follows the generation prompt" if not after.startswith(before) else "other turns follow"
                raise TemplateProblemError(
                    f"the template writes message {index + 1}, an answer, differently if {which}"
                )
            found.append((len(before), self._end(after, len(before))))
        return found

    def _end(self, text: str, begin: int) -> int:
        """Return the end of an answer. Line breaks after its end token come from the template, and are excluded."""
        kept = text[begin:].rstrip()
        return begin + len(kept) if kept.endswith(self.special) else len(text)

    def _run(
        self, of: Conversation, stop: int | None = None, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of the first `stop` messages, and the spans that the template marks."""
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
        # A lone surrogate, which JSON can hold, has no UTF-8. It is replaced by one character, so that spans stay
        # valid.
        (text,), spans = rendered
        return text.encode("utf-8", "replace").decode(), list(spans[0]) if marks else []
