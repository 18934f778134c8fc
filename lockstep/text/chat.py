"""Chat templates: Jinja source from a model's files, run in a sandbox.

The environment offers what templates written for Hugging Face's libraries expect: trimmed
blocks, `break` and `continue`, `raise_exception`, `strftime_now`, a `tojson` that leaves
HTML characters alone, and `generation` blocks. The sandbox keeps a template from everything
but what it is given, and a count of its steps from running for ever. What it builds is not
bounded in size: who can write a template can also write weights of any size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from lockstep.types import ModelError, RequestError

# Of one rendering: microseconds each. Templates take a few for a message and a tool.
STEPS, STEPS_EACH = 50_000, 100
MAX_PRODUCT = 1_000_000  # elements of a repeated sequence, bits of a number
_steps: ContextVar[list[int]] = ContextVar("steps")  # that a rendering may still take


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said; for prompts it renders as it stands."""

    tags = {"generation"}  # noqa: RUF012 - how Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _StepCount(jinja2.ext.Extension):
    """Counts the steps of a rendering; generated code calls `step`."""

    def step(self) -> None:
        """One pass through the body of a loop, a macro or a block.

        Raises:
            SecurityError: there have been too many.
        """
        left = _steps.get()
        left[0] -= 1
        if left[0] < 0:
            raise jinja2.exceptions.SecurityError("it takes too many steps")


class _Counted(jinja2.compiler.CodeGenerator):
    """Puts a call of `_StepCount.step` wherever the same code can run again.

    As a node of the syntax tree, which no name in a template can hide.
    """

    def visit_Template(
        self, node: jinja2.nodes.Template, frame: jinja2.compiler.Frame | None = None
    ) -> None:
        """Code of the whole template."""
        bodies = [
            *(found.body for found in node.find_all(jinja2.nodes.For)),
            *(found.body for found in node.find_all(jinja2.nodes.Macro)),
            *(found.body for found in node.find_all(jinja2.nodes.CallBlock)),
            *(found.body for found in node.find_all(jinja2.nodes.Block)),
        ]
        for body in bodies:
            step = jinja2.nodes.ExtensionAttribute(_StepCount.identifier, "step")
            call = jinja2.nodes.Call(step, [], [], None, None)
            body.insert(0, jinja2.nodes.ExprStmt(call, lineno=1))
        super().visit_Template(node, frame)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on what a few characters can make it do."""

    code_generator_class = _Counted
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """A product or a power.

        Raises:
            SecurityError: its result is too large.
        """
        if _size(operator, left, right) > MAX_PRODUCT:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Bits of a whole number that is about to be made, or elements of a sequence; else 0."""
    match operator, left, right:
        case "**", int(), int():
            return left.bit_length() * right
        case "*", int(), int():
            return left.bit_length() + right.bit_length()
        case ("*", str() | list() | tuple() as sequence, int(times)) | (
            "*",
            int(times),
            str() | list() | tuple() as sequence,
        ):
            return len(sequence) * times
    return 0


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, _StepCount, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def variables_of(source: str) -> frozenset[str]:
    """The names that a template reads from outside, such as `tools` and `enable_thinking`."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def _content(content: Any, where: str) -> Any:
    """A message's content with a list of text parts joined to one string.

    Raises:
        RequestError: a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, got {content!r}",
            field="messages",
        )
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise RequestError(
                f'{where}.content[{index}] must be {{"type": "text", "text": "..."}}: '
                "this model takes text only",
                field="messages",
            )
        texts.append(text)
    return "".join(texts)


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages in which every content is one text.

    Raises:
        RequestError: no messages, or a content that is no text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list", field="messages")
    result = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object, got {message!r}", field="messages")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role must be a string", field="messages")
        entry = dict(message)
        if "content" not in entry and "tool_calls" not in entry:
            raise RequestError(f"{where}.content is missing", field="messages")
        # Templates test `message.content`, and add it to strings: absent and None read as "".
        entry["content"] = _content(entry.get("content"), where) or ""
        result.append(entry)
    return result


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: the Jinja source.
        variables: names that every rendering sees, such as `bos_token`.

    Raises:
        ModelError: the source is no valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"chat template: {error}") from None
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """The prompt text; see `Tokenizer.render_chat`."""
        if tools is not None and not isinstance(tools, list | tuple):
            raise RequestError(f"tools must be a list, got {tools!r}", field="tools")
        variables = {
            **self._variables,
            **kwargs,
            "messages": normalised(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        token = _steps.set([STEPS + STEPS_EACH * (len(messages) + len(tools or ()))])
        try:
            return self._template.render(variables)
        except Exception as error:
            # A template is a program from the model's files: it may fail in any way, and
            # what it says (often by raise_exception) is the client's to read.
            raise RequestError(
                f"the model's chat template refused these messages: {error}",
                field="messages",
                code="chat_template_error",
            ) from error
        finally:
            _steps.reset(token)
