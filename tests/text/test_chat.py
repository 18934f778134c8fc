"""Chat templates: the same text as transformers makes, and complaints as request errors."""

from __future__ import annotations

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
