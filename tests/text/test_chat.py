"""Chat templates: the same text as transformers makes, and complaints as request errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE

from lockstep.text import Tokenizer
from lockstep.text.chat import ChatTemplate
from lockstep.types import ModelError, RequestError

USER = {"role": "user", "content": "Hi <b>&amp;</b> 'you'"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}

# In the manner of Gemma 2's template: no system role, strict alternation.
STRICT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user') }}
    {% endif %}
    <start_of_turn>{{ message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

TOOLS = """{%- for message in messages %}
{%- if loop.index > 3 %}{% break %}{% endif %}
{%- if message.role == "system" %}{% continue %}{% endif %}
{{- message.role }}: {% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}
{%- set ns = namespace(count=0) %}
{%- for tool in tools or [] %}{% set ns.count = ns.count + 1 %}
{{ tool | tojson }} {{ tool | tojson(indent=2) }}
{%- endfor %}
{{ ns.count }} {{ today is defined }} {{ tools is none }} {{ enable_thinking | default(true) }}"""

TOOL = {"type": "function", "function": {"name": "look", "description": "<a> & 'é'"}}


def render(source: str, messages: list[Any], **kwargs: Any) -> str:
    kwargs = {"tools": None, "add_generation_prompt": True, **kwargs}
    return ChatTemplate(source, {"bos_token": "<bos>"}).render(messages, **kwargs)


def expected(source: str, messages: list[Any], **kwargs: Any) -> str:
    """What transformers renders."""
    from transformers.utils.chat_template_utils import render_jinja_template

    kwargs = {"tools": None, "add_generation_prompt": True, **kwargs}
    rendered, _ = render_jinja_template(
        [messages], chat_template=source, bos_token="<bos>", **kwargs
    )
    return str(rendered[0])


@pytest.mark.parametrize(
    ("source", "messages", "kwargs"),
    [
        (STRICT, [USER], {}),
        (STRICT, [USER, ASSISTANT, USER], {"add_generation_prompt": False}),
        (TOOLS, [SYSTEM, USER, ASSISTANT, USER], {}),
        (TOOLS, [USER], {"tools": [TOOL], "enable_thinking": False, "today": "x"}),
    ],
)
def test_equal_to_transformers(source: str, messages: list[Any], kwargs: dict[str, Any]) -> None:
    assert render(source, messages, **kwargs) == expected(source, messages, **kwargs)


def test_smollm2_template(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    for messages in ([USER], [SYSTEM, USER], [USER, ASSISTANT, USER]):
        text = smollm2.render_chat(messages)
        assert text == expected(smollm2.chat_template, messages)
        ids = smollm2.encode_chat(messages)
        assert ids[0] == 1  # one <|im_start|>, not a second start token before it
        assert ids.count(2) == len(messages) + (messages[0]["role"] != "system")
        assert smollm2.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([SYSTEM], "System role not supported"),
        ([SYSTEM, USER], "System role not supported"),
        ([USER, USER], "roles must alternate"),
        ([USER, ASSISTANT], None),
        ([ASSISTANT], "roles must alternate"),
    ],
)
def test_a45_complaints_are_the_templates_own(messages: list[Any], complaint: str | None) -> None:
    if complaint is None:
        assert render(STRICT, messages).endswith("<start_of_turn>model\n")
        return
    with pytest.raises(RequestError, match=complaint) as caught:
        render(STRICT, messages)
    assert caught.value.field == "messages"
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, USER], [USER, USER], [USER, ASSISTANT]])
def test_a45_a_lenient_template_takes_them_all(smollm2: Tokenizer, messages: list[Any]) -> None:
    assert smollm2.render_chat(messages).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages | map('nothing') | list }}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ strftime_now(3) }}",
        "{{ {1: messages} | tojson }}{{ namespace | tojson }}",
    ],
)
def test_no_template_failure_is_unhandled(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source, [USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "{% nothing %}", "{% for %}"])
def test_a_template_that_is_none_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, {})


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "Hi <b>"}, {"type": "text", "text": "&amp;</b> 'you'"}]
    message = {"role": "user", "content": parts}
    assert render(STRICT, [message]) == render(STRICT, [USER])
    assert isinstance(message["content"], list)  # the client's message is left alone


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [3],
        [{"content": "no role"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": {"text": "x"}}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        render(STRICT, messages)
    assert caught.value.field == "messages"


def test_absent_content_reads_as_empty() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    text = render("{% for m in messages %}[{{ m.content }}]{% endfor %}", [USER, call])
    assert text.endswith("[]")


def test_a_client_cannot_replace_the_messages(smollm2: Tokenizer) -> None:
    arguments: dict[str, Any] = {"messages": [], "self": 1, "raise_exception": None}
    assert smollm2.render_chat([USER], **arguments) == smollm2.render_chat([USER])
    assert smollm2.encode_chat([USER], **arguments) == smollm2.encode_chat([USER])


@pytest.mark.parametrize("tools", [3, "tool", {"type": "function"}])
def test_tools_must_be_a_list(smollm2: Tokenizer, tools: Any) -> None:
    with pytest.raises(RequestError, match="tools must be a list"):
        smollm2.render_chat([USER], tools=tools)


def test_no_template_is_a_request_error(gemma: Tokenizer) -> None:
    assert gemma.chat_template is None
    with pytest.raises(RequestError, match="no chat template") as caught:
        gemma.encode_chat([USER])
    assert caught.value.code == "no_chat_template"


def test_a_decoder_of_unknown_meaning_is_refused() -> None:
    backend = Backend(BPE())
    with pytest.raises(ModelError, match="no decoder"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend)


HOSTILE = {
    # each would run for a long time, or take all memory, before it did any harm otherwise
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "filtered": "{% for a in range(9999) if true %}{% for b in range(9999) %}x{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "callers": "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{% endcall %}{% call m(n - 1) %}"
    "{% endcall %}{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks": "{% set ns = namespace(n=0) %}{% block b %}{% if ns.n < 10 ** 9 %}"
    "{% for i in [1, 2] %}{{ self.b() }}{% endfor %}{% endif %}{% endblock %}",
    "recursive": "{% set t = [1, 2] %}{% for a in t recursive %}{% if loop.depth < 60 %}"
    "{{ loop(t) }}{% endif %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "text": "{{ 'x' * 10 ** 12 }}",
    "list": "{{ ([0] * 10 ** 12) | length }}",
    "left": "{{ 10 ** 12 * 'x' }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "hidden": "{% set step = 1 %}{% set environment = 1 %}{% set lockstep = 1 %}"
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_template_runs_for_ever(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="chat template"):
        render(HOSTILE[name], [USER])
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__']",
        "'' | attr('__class__')",
        "'' | attr('__cla' ~ 'ss__')",
        "[''] | map(attribute='__class__') | list",
        "messages.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__",
        "strftime_now.__globals__['datetime']",
        "strftime_now.__code__",
        "raise_exception.__builtins__",
        "self.__init__.__globals__",
        "self._TemplateReference__context.environment",
        "cycler.__init__.__globals__.os",
        "namespace.__init__.__globals__",
        "lipsum.__globals__",
        "'{0.__class__.__mro__}'.format('')",
        "'{x.__class__}'.format_map({'x': 1})",
        "(messages | first).__class__",
        "messages[0].update({'role': 'x'})",
        "messages.append(1)",
        "messages.clear()",
        "__import__('os')",
        "open('/etc/passwd')",
        "eval('1')",
        "joiner.__class__.__base__",
    ],
)
def test_no_template_gets_out_of_its_sandbox(expression: str) -> None:
    """Refused, or nothing: an undefined value is an empty text."""
    messages = [dict(USER)]
    try:
        text = render("<{{ " + expression + " }}>", messages)
    except RequestError:
        text = "<>"
    assert text in ("<>", "<[Undefined]>")
    assert messages == [USER]


@pytest.mark.parametrize(
    "statement",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% from 'os' import system %}",
        "{% extends '/etc/passwd' %}",
        "{% do messages.append(1) %}",
        "{% debug %}",
    ],
)
def test_no_template_reads_files(statement: str) -> None:
    with pytest.raises((RequestError, ModelError), match="chat template"):
        render(statement, [USER])


def test_what_clients_send_is_text_and_no_template() -> None:
    source = "{{ messages[0].content }}|{{ x }}|{{ tools | tojson }}"
    hostile = "{{ 7 * 7 }}{% for i in range(9) %}{{ cycler }}{% endfor %}{{ x }}"
    message = {"role": "user", "content": hostile}
    tools = [{"type": "function", "function": {"name": "{{ 7 * 7 }}"}}]
    rendered = render(source, [message], x=hostile, tools=tools)
    assert "49" not in rendered
    assert rendered.startswith(f"{hostile}|{hostile}|")
    template = ChatTemplate("{{ messages | length }}{{ bos_token }}", {"bos_token": "<bos>"})
    given: dict[str, Any] = {"messages": [], "steps": 1, "environment": 2, "self": 3, "": 4}
    assert template.render([USER], tools=None, add_generation_prompt=True, **given) == "1<bos>"


def test_long_conversations_take_few_steps() -> None:
    messages = [USER, ASSISTANT] * 4096
    assert render(STRICT, messages).count("<start_of_turn>") == 8193
