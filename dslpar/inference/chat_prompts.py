"""Prompts as what a user says to the assistant: written by the template that the model has learned its answers in.

    asked = chat_prompts_of(job, tokenizer=None)
    asked.write("What is 2 + 2?")        # "<|im_start|>user\\nWhat is 2 + 2?<|im_end|>\\n<|im_start|>assistant\\n"
    asked.answer_ends                    # "<|im_end|>": what the template writes behind an answer

The template is the run's (data of type 'chat'), or else its tokenizer's own: see dslpar/data/chat_template.py.
"""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.data.chat_template import Renderer, TemplateProblemError
from dslpar.layout.resolve import Job
from dslpar.schema.chat_templates import template_of
from dslpar.schema.conversations import ASSISTANT, Conversation
from dslpar.schema.datasets import ChatData, parts_of

_USER = "user"
_ANSWER = "yes"
"""Any answer: what follows it in a conversation ends all of them."""


class ChatPrompts(NamedTuple):
    """How prompts are asked."""

    renderer: Renderer
    answer_ends: str
    """Empty: the template writes nothing behind an answer."""
    path: str
    """The config's, for messages."""

    def write(self, prompt: str) -> str:
        """Return the conversation up to where the assistant is to answer.

        Raises:
            DslparError: the template refuses it.
        """
        try:
            return self.renderer.prompt(Conversation([{"role": _USER, "content": prompt}]))
        except ValueError as error:
            hint = "a template that takes a conversation of one question: data.template"
            raise_finding("BAT219", f"a conversation of one question: {error}", hint, self.path, "data.template")


def chat_prompts_of(job: Job, tokenizer: str | None = None) -> ChatPrompts:
    """Return how a run's prompts are asked; `tokenizer`: a file or folder that is to be used instead of the run's.

    Raises:
        DslparError: there is no template, or it cannot be used.
    """
    parts = parts_of(job.spec.data)
    data = next((part for part in parts if isinstance(part, ChatData)), None)
    if data is None:
        named = next((name for part in parts if (name := getattr(part, "tokenizer", None))), None)
        data = ChatData(files=(), tokenizer=named)
    if tokenizer is not None:
        data = dataclasses.replace(data, tokenizer=os.path.abspath(tokenizer))
    template = template_of(data, job.path)
    if template.problem:
        hint = "data.template: a Jinja template, a file with one, or 'chatml'; or leave --chat out"
        raise_finding("BAT218", template.problem, hint, job.path, "data.template")
    renderer = Renderer(template, answers_only=False)
    question = {"role": _USER, "content": "?"}
    try:
        whole = renderer(Conversation([question, {"role": ASSISTANT, "content": _ANSWER}])).text
    except TemplateProblemError as error:
        raise_finding("BAT219", str(error), "correct the template", job.path, "data.template")
    except ValueError as error:
        raise_finding("BAT219", f"a conversation of one question: {error}", "correct it", job.path, "data.template")
    return ChatPrompts(renderer, whole.rpartition(_ANSWER)[2].strip(), job.path)
