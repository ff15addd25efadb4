"""Trains tokenizers on a run's own texts; they need no folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ..errors import nearest, refuse
from .tokenizer import Tokenizer

# WordPiece is not trained: the library numbers its pieces in an order that differs by run.
SPECIAL = {
    "bpe": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "roberta": {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>",
                "mask": "<mask>"},
    "span": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "fim": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
}  # fmt: skip
SENTINELS = {  # what stands for a span that is to be predicted, or before each part of a text that is rearranged
    "span": tuple(f"<extra_id_{k}>" for k in range(100)), "fim": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
}  # fmt: skip


def made_here(spec: str) -> bool:
    """Whether a recipe's `tokenizer` means one that is trained on the run's own texts."""
    return spec == "char" or (spec.partition(":")[0] in SPECIAL and not Path(spec).exists())


def special_tokens(kind: str) -> list[str]:
    """What stands before the bytes in a vocabulary of this kind."""
    return [*dict.fromkeys(SPECIAL[kind].values()), *SENTINELS.get(kind, ())]


def least(kind: str) -> int:
    """The smallest vocabulary of this kind: its special tokens, and each byte."""
    return 256 + len(special_tokens(kind))


def train_tokenizer(texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> Tokenizer:
    """Train byte-level BPE on `texts`: `bpe` with GPT-2's <|endoftext|>, `roberta` with RoBERTa's special tokens, `span` with
    padding as number 0 and a hundred sentinels, for span corruption, `fim` as bpe with the three marks of fill-in-the-middle.

    The special tokens have the first ids. `vocab_size` is an upper bound: a small text has fewer merges.
    """
    if kind not in SPECIAL:
        refuse(None, "tokenizer", repr(kind), nearest(kind, SPECIAL))
    special, tokens = SPECIAL[kind], special_tokens(kind)
    if vocab_size < least(kind):
        refuse(None, "tokenizer", f"{kind}:{vocab_size}", f"at least {least(kind)} tokens")
    raw = byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the library gives a set, whose order differs by run
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(texts, trainer)
    if "cls" in special:
        cls, sep = ((special[role], tokens.index(special[role])) for role in ("cls", "sep"))
        raw.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=False, add_prefix_space=False)
    return Tokenizer(raw, special, f"{kind}:{vocab_size}")


def byte_level(model: Any, prefix_space: bool = False) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    return raw
