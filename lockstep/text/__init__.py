"""Text: prompts to tokens, tokens to answers, and what answers are held to.

Where things go:
- `tokenizer.py`: `Tokenizer`, ids and bytes of a vocabulary, on top of `tokenizers`.
- `vocabulary.py`: a `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.
- `pretokenizers.py`: the pre-tokenizer kinds that GGUF files name.
- `chat.py`: chat templates, sandboxed.
- `detokenizer.py`: bytes of tokens to text, one token at a time.
- `stops.py`: stop strings over token borders.
- `stream.py`: `TextStream`, which builds every answer's text, streamed or whole.
- `turn.py`, `dialect.py`, `prompt.py`: a conversation with functions, how one model talks, and
  what the model reads of both.
- `events.py`, `reasoning.py`, `answer.py`: an answer's text to reasoning, content and calls;
  `tools/`: the formats of calls.
- `grammar.py`, `grammar_schema.py`, `grammar_matcher.py`: what an answer is held to: said,
  checked, at work.

A leaf: imports only `lockstep.types`, and no torch.
"""

from __future__ import annotations

from lockstep.text.stream import TextDelta, TextStream
from lockstep.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextStream", "Tokenizer"]
