"""Function calls in a model's text: one file a format, and what chooses among them.

Where does it go? What a format is stands in `base`, reading JSON a character at a time in
`scan`, and the formats in files of their own: `hermes`, `llama`, `mistral`, `pythonic`,
`qwen_coder`. `registry` names them and picks the one that a model writes.
"""

from lockstep.text.tools.base import Function, ToolChoice, ToolFormat

__all__ = ["Function", "ToolChoice", "ToolFormat"]
