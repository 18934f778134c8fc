"""Request bodies, and what they mean.

Strict: a wrong type is an error, and so is an unknown field. OpenAI fields that this
server does not implement are accepted only with values that leave the answer as it is.
"""

from lockstep.server.protocol.chat import MAX_MESSAGES, ChatBody
from lockstep.server.protocol.completions import MAX_PROMPTS, CompletionBody
from lockstep.server.protocol.generation import Body, GenerationBody

__all__ = [
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "Body",
    "ChatBody",
    "CompletionBody",
    "GenerationBody",
]
