"""Request bodies, and what they mean.

Strict: a wrong type is an error, and so is an unknown field. OpenAI fields that this
server does not implement are accepted only with values that leave the answer as it is.

Where things go:
- `body.py`: the base of all. `generation.py`: what `chat.py` and `completions.py` share.
- `tools.py`: functions and calls. `gate.py`: `gate` of both.
- `questions.py`: typed questions. `inputs.py`: OpenAI's input items. `parts.py`: JSON as text.
"""

from lockstep.server.protocol.body import Body
from lockstep.server.protocol.chat import MAX_MESSAGES, ChatBody
from lockstep.server.protocol.completions import MAX_PROMPTS, CompletionBody
from lockstep.server.protocol.generation import GenerationBody

__all__ = [
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "Body",
    "ChatBody",
    "CompletionBody",
    "GenerationBody",
]
