"""Chat messages to the text of a prompt, by the model's own template."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specserve.models.hub import ModelError

ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """A Jinja chat template, run in a sandbox with what transformers' `apply_chat_template` offers to templates.

    The rendered text has whatever BOS the template writes: encode it with `add_special_tokens=False`.
    """

    def __init__(self, template: str | None, special_tokens: Mapping[str, str]) -> None:
        """Compile `template`; `special_tokens` are its variables "bos_token", "eos_token", …

        With None, `render` says that the model has no template. Raises ModelError for a template that isn't valid.
        """
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        if template is not None:
            try:
                self._template = _environment().from_string(template)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(f"the model's chat template is not valid: line {error.lineno}: {error}") from error

    @property
    def exists(self) -> bool:
        """Whether the model has one."""
        return self._template is not None

    def user_header(self) -> str:
        """The text in front of what a user says first. ValueError as in render."""
        mark = "\u2402specserve\u2403"
        text, found, _ = self.render([{"role": "user", "content": mark}]).partition(mark)
        if not found:
            raise ValueError("the model's chat template leaves out what the user says")
        return text

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text of the prompt, with the header of the assistant's answer at its end.

        Each message has "role" and "content". Raises ValueError, in one line, for no messages, a role outside
        ROLES, messages that the template refuses, and a model without a template.
        """
        if self._template is None:
            raise ValueError("chat: the model has no chat template; send text or token_ids instead")
        if not messages:
            raise ValueError("chat.messages is empty; send at least one message")
        for i, message in enumerate(messages):
            if message.get("role") not in ROLES:
                raise ValueError(
                    f"chat.messages[{i}].role is {message.get('role')!r}; it must be one of {', '.join(ROLES)}"
                )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of the model's maker, and can fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"chat.messages: the model's chat template refuses them: {reason}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, by which templates mark the assistant's words for training; here just its body."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Turn the block into a call that gives back its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
