"""The formats by name, and the one that a chat template is written for."""

from __future__ import annotations

from lockstep.text.tools import mistral
from lockstep.text.tools.base import ToolFormat
from lockstep.text.tools.hermes import HermesFormat
from lockstep.text.tools.llama import LlamaFormat
from lockstep.text.tools.mistral import MistralFormat
from lockstep.text.tools.pythonic import PythonicFormat
from lockstep.text.tools.qwen_coder import QwenCoderFormat

FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        HermesFormat(),
        LlamaFormat(),
        MistralFormat(named=False),
        MistralFormat(named=True),
        PythonicFormat(),
        QwenCoderFormat(),
    )
}


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None when it is none of these."""
    if "<function=" in template:
        name = "qwen3_coder"
    elif "<tool_call>" in template and "<arg_key>" not in template:
        name = "hermes"
    elif mistral.START in template:
        name = "mistral_named" if mistral.is_named(template) else "mistral"
    elif "<|python_start|>" in template:
        name = "pythonic"
    elif "<|python_tag|>" in template or "Environment: ipython" in template:
        name = "llama3_json"
    else:
        return None
    return FORMATS[name]
