"""Text: tokens to characters and back, chat templates, stop strings.

Where things go:
- `tokenizer.py`: `Tokenizer`, ids and bytes of a vocabulary, on top of `tokenizers`.
- `vocabulary.py`: a `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.
- `pretokenizers.py`: the pre-tokenizer kinds that GGUF files name.
- `chat.py`: chat templates, sandboxed.
- `detokenizer.py`: bytes of tokens to text, one token at a time.
- `stops.py`: stop strings over token borders.
- `stream.py`: `TextStream`, which builds every answer's text, streamed or whole.

A leaf: imports only `lockstep.types`, and no torch.
"""

from __future__ import annotations

from lockstep.text.stream import TextDelta, TextStream
from lockstep.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextStream", "Tokenizer"]
