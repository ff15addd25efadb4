"""Fill-in-the-middle: a document's middle is moved to its end, to be predicted from what surrounded it. Bavarian et al., 2022."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ...errors import refuse
from ..config import DataConfig
from ..indexed import Tokens
from ..objective import register
from ..ragged import Ragged
from ..record import Record
from ..sequence import Sequences
from .lm import Blocks, Causal, Documents

if TYPE_CHECKING:
    from ..encode import Reader
    from ..tokenizer import Tokenizer

MARKS = (  # before the prefix, the suffix, the middle
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # StarCoder, SantaCoder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Qwen, CodeGemma; Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("<PRE>", "<SUF>", "<MID>"),  # DeepSeek; the paper
)  # fmt: skip


@register
class FIM(Causal):
    """Documents of which `fim_rate` are rearranged, by characters, before they become tokens. Which ones, and how, is drawn
    once."""

    name = "fim"
    keys = ("text_key", "fim_rate", "fim_spm_rate")

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        if isinstance(records, Tokens):
            refuse(records.files[0].file, "objective", "fim with token files, whose texts are cut already", "texts")
        marks, (before, after) = marks_of(read.tokenizer, read.vocab), self.frame(read)
        rows = Ragged()
        for k, record in enumerate(records):
            text = record.text(data.text_key, "data.text_key")
            if text:
                random = np.random.default_rng((read.seed, k, 5))
                rows.append([*before, *rearranged(record, text, read, data, marks, random), *after])
        if not rows.total:
            refuse(records[0].file, data.text_key, "no token in all texts", "a text")
        return Documents(rows, read, data) if data.packing else Blocks(rows, read, data)


def rearranged(record: Record, text: str, read: "Reader", data: DataConfig, marks: Sequence[int], random: np.random.Generator
               ) -> list[int]:
    """The ids of a text: as it is, or prefix, suffix, middle, each behind its mark; or, for `fim_spm_rate` of those, the suffix,
    then the prefix and the middle, the marks as the paper has them (section 3)."""
    if random.random() >= data.fim_rate:
        return read.encode(record, text)
    a, b = sorted(random.integers(0, len(text) + 1, 2).tolist())
    prefix = read.tokenizer.encode(text[:a], special=False)
    middle, suffix = (read.tokenizer.inside.encode(part, special=False) for part in (text[a:b], text[b:]))
    if not read.holds([*prefix, *middle, *suffix]):
        read.encode(record, text)  # names the place
        read.refuse(record, [*prefix, *middle, *suffix])
    pre, suf, mid = marks
    if random.random() < data.fim_spm_rate:
        return [*chain([pre, suf], suffix, [mid], prefix, middle)]
    return [*chain([pre], prefix, [suf], suffix, [mid], middle)]


def marks_of(tokenizer: "Tokenizer", vocab: int | None) -> list[int]:
    """The ids of the three marks, as one family or another names them."""
    known = tokenizer.vocabulary
    found = next(([known[mark] for mark in names] for names in MARKS if all(mark in known for mark in names)), None)
    if found is None:
        lack = "fim with a tokenizer that has no marks for it"
        refuse(tokenizer.name, "objective", lack, f"{', '.join(MARKS[0])} (tokenizer=fim:8000), or those of another family")
    if vocab is not None and max(found) >= vocab:
        refuse(tokenizer.name, "objective", f"fim, whose marks have ids up to {max(found)}", f"a model of more than {vocab} tokens")
    return found
