"""What a chat template is told of functions, calls and results; which format it is written for."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from lockstep.text import Tokenizer
from lockstep.text.dialect import Dialect
from lockstep.text.reasoning import THINK_MARKERS
from lockstep.text.tools import Function, ToolChoice
from lockstep.text.tools.mistral import short_id
from lockstep.text.tools.prompting import check_calls, without_system
from lockstep.text.tools.registry import FORMATS
from lockstep.types import RequestError

LOOK = Function("look", "Look <there>.", {"type": "object", "properties": {"at": {}}})
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "é"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Look at é."},
    {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "tool_call_id": "call_1"},
]

QWEN = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>{"name": ...}</tool_call>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}{% endfor %}<assistant>{% if enable_thinking is defined and not enable_thinking -%}
<think></think>{% endif %}"""


def tokenizer(template: str | None, special: tuple[str, ...] = ()) -> Tokenizer:
    names = "abcdefghijklmnopqrstuvwxyz<>/[]_|"
    backend = Backend(BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Tokenizer(backend, chat_template=template, eos_ids=[0])


@pytest.mark.parametrize(
    ("template", "name", "native"),
    [
        (QWEN, "hermes", True),
        ("{{ tools }}<tool_call>\n<function=x>", "qwen3_coder", True),
        ("{{ tools }}[TOOL_CALLS]", "mistral", True),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", "mistral_named", True),
        ("{{ tools }}<|python_start|>", "pythonic", True),
        ("{{ tools }}<|python_tag|>", "llama3_json", True),
        ("{{ tools }}Environment: ipython", "llama3_json", True),
        ("{{ tools }}<tool_call>{{ x }}<arg_key>", "hermes", False),  # GLM's, not known here
        ("{{ tools }}some other form", "hermes", False),
        ("{{ messages }} <tool_call>", "hermes", False),
        ("{{ messages }}", "hermes", False),
        (None, "hermes", False),
    ],
)
def test_the_format_follows_the_template(template: str | None, name: str, native: bool) -> None:
    dialect = Dialect.of(tokenizer(template))
    assert (dialect.tools.name, dialect.native) == (name, native)


def test_settings_win_over_the_template() -> None:
    dialect = Dialect.of(tokenizer(QWEN), tool_parser="pythonic", reasoning_parser="mistral")
    assert dialect.tools is FORMATS["pythonic"]
    assert dialect.native
    assert dialect.thinking == THINK_MARKERS["mistral"]
    assert Dialect.of(tokenizer(QWEN), reasoning_parser="none").thinking is None
    assert Dialect.of(tokenizer(QWEN)).thinking == THINK_MARKERS["think"]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", ["auto", "required", "none"])
def test_several_calls_unless_nobody_taught_it_to_stop(native: bool, mode: Any) -> None:
    dialect = Dialect.of(tokenizer(QWEN if native else None))
    assert dialect.settle(ToolChoice(mode)).parallel is (native or mode != "required")
    for given in (True, False):
        assert dialect.settle(ToolChoice(mode, None, given)).parallel is given


def test_a_format_that_nobody_teaches_the_model_is_refused(smollm2: Tokenizer) -> None:
    dialect = Dialect.of(smollm2, tool_parser="pythonic")
    assert dialect.prompt(TALK[:1], [])[1] is None
    with pytest.raises(RequestError, match="template of this model takes no tools") as caught:
        dialect.prompt(TALK[:1], [LOOK])
    assert caught.value.field == "tools"


def test_a_template_that_knows_functions_gets_them() -> None:
    dialect = Dialect.of(tokenizer(QWEN))
    messages, tools = dialect.prompt(TALK, [LOOK])
    assert tools == [LOOK.declaration()]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": "é"}
    assert messages[2]["name"] == "look"
    assert TALK[1]["tool_calls"][0]["function"]["arguments"] == '{"at": "é"}'  # left alone
    assert dialect.prompt(TALK, [])[1] is None
    broken = [{**TALK[1], "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]
    assert dialect.prompt(broken, [])[0][0]["tool_calls"][0]["function"]["arguments"] == "{"


def test_mistral_ids_are_nine_letters_and_digits() -> None:
    dialect = Dialect.of(tokenizer("{{ tools }}[TOOL_CALLS]"))
    messages, _ = dialect.prompt(TALK, [LOOK])
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == short_id("call_1")
    assert len(short_id("call_1")) == 9
    assert short_id("abcDEF123") == "abcDEF123"
    assert short_id("call_1") != short_id("call_2")


def test_calls_side_by_side_for_a_template_that_takes_one_a_message() -> None:
    template = """{{ tools is defined }}<|python_tag|>{% for m in messages %}
    {%- if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception("one") }}{% endif %}
    {{- m.role }}:{{ m.content }}{{ (m.tool_calls or [{}])[0].id }};{% endfor %}"""
    text = tokenizer(template)
    calls = [{**CALL, "id": name} for name in "abc"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "bca"]
    said = {"role": "assistant", "content": "Yes.", "tool_calls": calls}
    talk = [TALK[0], said, *results, {"role": "user", "content": "And?"}]
    check_calls(talk)
    messages, tools = Dialect.of(text).prompt(talk, [LOOK])
    assert text.render_chat(messages, tools=tools).endswith(
        "user:Look at é.;assistant:Yes.a;tool:a;assistant:b;tool:b;assistant:c;tool:c;user:And?;"
    )
    assert said["tool_calls"] is calls


def test_a_template_that_knows_none_is_told_in_text(smollm2: Tokenizer) -> None:
    dialect = Dialect.of(smollm2)
    assert not dialect.native
    messages, tools = dialect.prompt([*TALK, {"role": "user", "content": "And?"}], [LOOK])
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert '"name": "look", "description": "Look <there>."' in messages[0]["content"]
    assert messages[2]["content"] == (
        'Yes.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    )
    assert messages[3]["content"] == "<tool_response>\nfound\n</tool_response>\nAnd?"
    assert smollm2.render_chat(messages).endswith("<|im_start|>assistant\n")
    system = {"role": "system", "content": "Be brief."}
    messages, _ = dialect.prompt([system, *TALK], [LOOK])
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions.")
    assert system["content"] == "Be brief."
    assert dialect.prompt(TALK[:1], []) == ([TALK[0]], None)


def test_results_side_by_side_are_one_message(smollm2: Tokenizer) -> None:
    calls = [{**CALL, "id": name} for name in "ab"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "ba"]
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    check_calls(talk)
    messages, _ = Dialect.of(smollm2).prompt(talk, [])
    assert len(messages) == 3
    assert messages[2]["content"].count("<tool_response>") == 2


def test_without_a_system_role() -> None:
    system = {"role": "system", "content": "S"}
    assert without_system([system, TALK[0]]) == [{"role": "user", "content": "S\n\nLook at é."}]
    assert without_system([system]) == [{"role": "user", "content": "S"}]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (TALK[1:2], "messages.0..tool_calls: call 'call_1' has no"),
        ([*TALK, TALK[2]], "messages.3..tool_call_id: 'call_1' answers no call"),
        ([TALK[2]], "messages.0..tool_call_id"),
        ([TALK[1], TALK[0], TALK[2]], "messages.0..tool_calls"),
        ([{**TALK[1], "tool_calls": [CALL, CALL]}], "there twice"),
    ],
)
def test_calls_and_results_belong_together(messages: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        check_calls(messages)
    assert caught.value.field == "messages"


def test_control_tokens_of_the_format_are_shown() -> None:
    special = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<s>")
    text = tokenizer("{{ tools }}[TOOL_CALLS][ARGS] [THINK] [/THINK]", special)
    dialect = Dialect.of(text)
    ids = {name: text.token_id(name) for name in special}
    form = dialect.answer(text, [0], [LOOK], ToolChoice())
    assert dialect.shown(form) == {ids[name] for name in special[:4]}
    plain = dialect.answer(text, [0], [], ToolChoice())
    assert dialect.shown(plain) == {ids["[THINK]"], ids["[/THINK]"]}
    none = dialect.answer(text, [0], [LOOK], ToolChoice("none"))
    assert none.tools is None


@pytest.mark.parametrize(
    ("prompt", "looked_for", "opened"),
    [("user<think>", True, True), ("<think></think>", False, False), ("<think>a", True, False)],
)
def test_the_prompts_end_says_whether_it_thinks(
    prompt: str, looked_for: bool, opened: bool
) -> None:
    text = tokenizer(QWEN)
    form = Dialect.of(text).answer(text, text.encode(prompt), [], ToolChoice())
    assert (form.thinking is not None, form.thinking_opened) == (looked_for, opened)
