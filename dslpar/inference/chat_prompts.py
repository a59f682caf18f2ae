"""Chat prompts: render user messages with the chat template that the model was trained on.

    asked = chat_prompts_of(job, tokenizer=None)
    asked.write("What is 2 + 2?")        # "<|im_start|>user\\nWhat is 2 + 2?<|im_end|>\\n<|im_start|>assistant\\n"
    asked.answer_ends                    # "<|im_end|>": what the template writes behind an answer

The template is that of the run's data (type 'chat'), or else that of the run's tokenizer. See
dslpar/data/chat_template.py.
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
"""Sample answer, any text. The template's text after it is the text that ends every answer."""


class ChatPrompts(NamedTuple):
    """Chat template for single-turn conversations."""

    renderer: Renderer
    answer_ends: str
    """Text that the template writes after an answer; empty: none."""
    path: str
    """Path of the config, for messages."""

    def write(self, prompt: str) -> str:
        """Return the conversation up to the assistant's answer.

        Raises:
            DslparError: the template refuses a single-turn conversation.
        """
        try:
            return self.renderer.prompt(Conversation([{"role": _USER, "content": prompt}]))
        except ValueError as error:
            hint = "set data.template to a template that takes a single-turn conversation"
            raise_finding("BAT219", f"a single-turn conversation: {error}", hint, self.path, "data.template")


def chat_prompts_of(job: Job, tokenizer: str | None = None) -> ChatPrompts:
    """Return a run's chat template for prompts. `tokenizer`: a file or folder to use instead of the run's tokenizer.

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
        hint = "set data.template to 'chatml', a Jinja template or a file with one; or leave --chat out"
        raise_finding("BAT218", template.problem, hint, job.path, "data.template")
    renderer = Renderer(template, answers_only=False)
    question = {"role": _USER, "content": "?"}
    try:
        whole = renderer(Conversation([question, {"role": ASSISTANT, "content": _ANSWER}])).text
    except TemplateProblemError as error:
        raise_finding("BAT219", str(error), "correct the template", job.path, "data.template")
    except ValueError as error:
        raise_finding("BAT219", f"a single-turn conversation: {error}", "correct it", job.path, "data.template")
    return ChatPrompts(renderer, whole.rpartition(_ANSWER)[2].strip(), job.path)
