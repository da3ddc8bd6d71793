"""The tokenizer of a GGUF file as Hugging Face files: `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .files import write_json

_CONTROL = 3


def tokenizer_from(fields: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE with the file's vocabulary. `smollm` splits every digit off, as its training did."""
    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError("this is not a SmolLM tokenizer")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def write(tokenizer: Tokenizer, fields: dict[str, Any], out: Path) -> None:
    """Write both files into `out`."""
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]

    def named(role: str) -> str:
        return str(tokens[fields[f"tokenizer.ggml.{role}_token_id"]])

    config = {
        "add_prefix_space": False,
        "bos_token": named("bos"),
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": named("eos"),
        "model_max_length": fields["llama.context_length"],
        "pad_token": named("padding"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": named("unknown"),
    }
    write_json(out / "tokenizer_config.json", config)
