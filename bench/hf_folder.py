"""Write any checkpoint as a Hugging Face folder in bfloat16, for engines that read only those.

python -m bench.hf_folder smollm2 FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from lockstep.weights import open_checkpoint


def write(name: str, folder: Path) -> Path:
    """The folder of `name`, written if it is not there yet.

    Holds config.json, model.safetensors and the tokenizer with its chat template: what
    transformers and vLLM need to generate and to serve.
    """
    _write_tokenizer(name, folder)
    if (folder / "config.json").exists():
        return folder
    checkpoint = open_checkpoint(name)
    tensors = {
        key: checkpoint.tensor(key).to(torch.bfloat16).contiguous()
        for key in checkpoint.tensor_names()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tied = "lm_head.weight" not in tensors
    config = {**checkpoint.config, "torch_dtype": "bfloat16", "tie_word_embeddings": tied}
    # Last, so that a broken run does not look finished.
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _write_tokenizer(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = open_checkpoint(name).tokenizer()
    tokenizer.save(folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token_text(tokenizer.eos_ids[0]),
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
