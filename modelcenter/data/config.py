"""The `data` section of a recipe: which files, which fields of a record, and how long an example is.

Torch-free, so that a recipe is checked before anything heavy is imported. The metadata of a field hold its help text and its bounds
(`min` and `max` inclusive, `above` exclusive), which are enforced when a recipe is read.
"""

from dataclasses import dataclass, field
from typing import Literal

from ..config import checked, says

Format = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "tokens"]


@dataclass(frozen=True)
class DataConfig:
    """Files, keys and lengths. If only some objectives read a key, their names follow its meaning; with others it is refused. The
    key of a text names a field, or several in braces: `{question} {passage}`."""

    path: str | tuple[str, ...] | dict[str, float] | None = field(
        default=None,
        metadata=says("training data: a file, folder, glob or datasets:NAME[,CONFIG][:SPLIT]; more of them: a list, or "
                      "{one: weight, another: weight}", above=0),
    )  # fmt: skip
    eval_path: str | tuple[str, ...] | dict[str, float] | None = field(
        default=None, metadata=says("evaluation data, in the same forms as `path`; takes precedence over eval_fraction", above=0)
    )
    eval_fraction: float = field(
        default=0.0,
        metadata=says("share of `path` held out for evaluation: its last part; of a list the end, of a mixture each source's; "
                      "0: none", min=0, max=0.9),
    )
    format: Format = field(default="auto", metadata=says("auto: by the ending, text if it is unknown"))
    header: bool = field(
        default=True, metadata=says("csv and tsv: the first row names the fields; false: they are called 0, 1 and so on")
    )
    text_key: str = field(
        default="text",
        metadata=says("the field of the text, or of the first one of a pair (classify, contrastive, coreference, fim, lm, mlm, "
                      "multilabel, prefix_lm, regress, similarity, span)"),
    )  # fmt: skip
    pair_key: str | None = field(
        default=None,
        metadata=says("the field of the second text of a pair (classify, contrastive, multilabel, regress, similarity)"),
    )
    negative_key: str | None = field(
        default=None, metadata=says("the field of a negative text, or of a list of them (contrastive)")
    )
    score_max: float = field(default=1.0, metadata=says("scores are divided by it; STS: 5 (similarity)", above=0))
    source_key: str = field(default="source", metadata=says("the field of the input (seq2seq)"))
    target_key: str = field(default="target", metadata=says("the field of the wanted output (seq2seq)"))
    source_prefix: str = field(default="", metadata=says("put before every source: `translate English to German: ` (seq2seq)"))
    label_key: str = field(
        default="label",
        metadata=says("the field of the class, the value, the labels or the score (classify, coreference, multilabel, regress, "
                      "similarity)"),
    )  # fmt: skip
    spans_key: str = field(
        default="target", metadata=says("the field of two spans: span1_index, span1_text and span2's (coreference)", min=1)
    )
    words_key: str = field(default="tokens", metadata=says("the field of a sentence's words (tag)"))
    tags_key: str = field(default="tags", metadata=says("the field of their tags, numbers or names (tag)"))
    context_key: str = field(default="context", metadata=says("the field of the text that holds the answer (choice, qa)"))
    question_key: str = field(default="question", metadata=says("the field of the question (choice, qa)"))
    answers_key: str = field(
        default="answers", metadata=says("the field of the answers: text with answer_start, or with label (choice, qa)")
    )
    stride: int = field(default=128, metadata=says("tokens that two windows of a context share (qa)", min=0))
    prompt_key: str | None = field(default=None, metadata=says("the field of a prompt, read but not trained on (lm, prefix_lm)"))
    response_key: str | None = field(default=None, metadata=says("the field of the response to prompt_key (lm, prefix_lm)"))
    messages_key: str | None = field(
        default=None, metadata=says("the field of a conversation's messages; null: messages or conversations (chat)")
    )
    chat_template: str | None = field(
        default=None, metadata=says("chatml or plain; null: the tokenizer's own; auto: that, or plain where it has none (chat)")
    )
    seq_len: int = field(
        default=512,
        metadata=says("tokens of an example: blocks (lm, mlm) or truncation; 512: or the model's positions, if fewer", min=2),
    )
    target_len: int | None = field(default=None, metadata=says("tokens of a target; null: seq_len (seq2seq)", min=2))
    packing: bool = field(
        default=False, metadata=says("fill rows of seq_len with whole sequences, none attending to another; no blocks (lm, mlm)")
    )
    padding_free: bool | None = field(
        default=None,
        metadata=says("put the sequences of a batch side by side instead of padding them; null: where padding would be much"),
    )
    mlm_probability: float = field(default=0.15, metadata=says("the share of tokens to predict (mlm, span)", above=0, max=1))
    whole_words: bool = field(default=False, metadata=says("predict all tokens of a word, or none (mlm)"))
    fim_rate: float = field(default=0.5, metadata=says("share of documents whose middle moves to the end (fim)", min=0, max=1))
    fim_spm_rate: float = field(default=0.5, metadata=says("of these, the share that begins with the suffix (fim)", min=0, max=1))
    span_length: float = field(default=3.0, metadata=says("tokens of a masked span on average (span)", min=1))
    group_by_length: bool = field(default=False, metadata=says("put examples of similar length in a batch, for less padding"))
    shuffle: bool = field(default=True, metadata=says("shuffle the training examples anew each epoch"))

    def __post_init__(self) -> None:
        checked(self)


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """What `tokenize` takes."""

    path: str = field(metadata=says("text: a file, a folder, a glob or datasets:NAME[,CONFIG][:SPLIT]", min=1))
    out: str = field(metadata=says("the files to write, without their endings", min=1))
    tokenizer: str = field(metadata=says("a folder, a preset or a hub id", min=1))
    objective: Literal["lm", "mlm"] = field(default="lm", metadata=says("which tokens separate the documents"))
    format: Format = field(default="auto", metadata=says("auto: by the ending, text if it is unknown"))
    text_key: str = field(default="text", metadata=says("the field of the text"))
    processes: int | None = field(default=None, metadata=says("null: one per processor", min=1, max=1024))
