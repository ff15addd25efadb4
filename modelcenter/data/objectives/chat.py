"""Instruction tuning on conversations: all turns are read, and those of the assistant are trained on, except those with `weight`
0."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import nearest, refuse
from ..chat import NAMED, Template, joined
from ..collate import IGNORED
from ..config import DataConfig
from ..objective import register
from ..ragged import Ids, Ragged
from ..record import Record, reached
from ..sequence import Sequences, filler
from .lm import Causal

if TYPE_CHECKING:
    from ..encode import Reader
    from ..tokenizer import Tokenizer

KEYS = ("messages", "conversations")  # where conversations are looked for, if no key is given
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
            "assistant": "assistant", "system": "system", "tool": "tool"}  # fmt: skip
ROLES = ("assistant", "developer", "system", "tool", "user")  # that templates know; some have more
ROW = ("instruction", "input", "output")  # Alpaca's; `input` may be empty


@register
class Chat(Causal):
    name = "chat"
    keys = ("messages_key", "chat_template")

    def verify(self, data: DataConfig) -> None:
        if data.chat_template not in (None, "auto", *NAMED):
            refuse(None, "data.chat_template", repr(data.chat_template), nearest(data.chat_template, (*NAMED, "auto")))

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        return (text for message in conversation(record, data) if isinstance(text := joined(message).get("content"), str))

    def ends(self, tokenizer: "Tokenizer") -> tuple[int, ...]:
        if tokenizer.chat_template is None:
            return ()
        ids = tokenizer.encode(Template(tokenizer).tail(), special=False)
        return tuple(i for i in ids if i in tokenizer.special_ids)[:1]

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        return Chats(records, read, data)


class Chats(Sequences):
    """Conversations, each cut after seq_len tokens; one in which nothing is then left to train on is left out. If the template
    writes a turn differently once others follow it, there is an example for each turn of the assistant."""

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        self.fill, self.size, self.ids, self.trained = filler(read.tokenizer), data.seq_len, Ragged(), Ragged()
        template, mute, count, cut, roles = Template(read.tokenizer, data.chat_template), 0, 0, 0, set[str]()
        use, first, empty, answers = "train on" if read.train else "evaluate on", None, 0, 0
        for record in records:
            messages = conversation(record, data)
            roles |= {message["role"] for message in messages}
            learned = [message for message in messages if message["role"] == "assistant" and message.get("weight") != 0]
            if none := sum(map(is_empty, learned)):
                first, empty = first or record, empty + none
            answers += len(learned)
            for text, spans in template.marked_texts(record, messages, tools_of(record)):
                ids, places = read.encode_places(record, text)
                whole, count = written(places, spans), count + 1
                trained = whole[: data.seq_len]
                if trained[1:].any():
                    cut += bool(whole[data.seq_len :].any())
                    self.ids.append(ids[: data.seq_len])
                    self.trained.append(trained.tolist())
                else:
                    mute += 1
        if "assistant" not in roles:
            found = f"no message of the assistant in any of {count} conversations, only of {', '.join(sorted(roles))}"
            refuse(records[0].file, "data.messages_key", found, "messages whose role is assistant")
        if not len(self.ids):
            found = f"no token of the assistant to {use} within {data.seq_len} tokens of any of the {count} conversations"
            refuse(records[0].file, "data.seq_len", found, "answers, or a greater length")
        if odd := sorted(roles - {*ROLES}):
            told = f"{records[0].file}: messages of {', '.join(odd)}, which few templates know: {nearest(odd[0], ROLES)}"
            warnings.warn(told, stacklevel=2)
        if mute:
            said = f"{mute:,} of {count:,} conversations have no token of the assistant to {use} within {data.seq_len}: left out"
            warnings.warn(said, stacklevel=2)
        read.tell_empty(empty, answers, "answers of the assistant", first)
        others = "other conversations" if mute else "conversations"
        read.tell_long(cut, count - mute, others, "data.seq_len", self.size, "what the assistant says beyond")
        self.lengths = np.diff(self.ids.bounds)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of one conversation."""
        ids, trained = self.ids[index], self.trained[index].astype(bool)
        trained[0] = False
        return ids, np.where(trained, ids, IGNORED)


def written(places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Which tokens, each given by its range of characters, overlap one of `spans`. An empty range is that of spaces alone, which
    some tokenizers (RoBERTa's, LLaMA 3's) leave out of every range: they stand before it."""
    starts, stops = np.array(places, np.int64).reshape(-1, 2).T
    starts = starts - (starts == stops)
    out = np.zeros(len(places), np.bool_)
    for begin, end in spans:
        out |= (starts < end) & (stops > begin)
    return out


def conversation(record: Record, data: DataConfig) -> list[dict[str, Any]]:
    """The messages of a record, each with a role and a content: from a list of them, from ShareGPT's list, or from Alpaca's row,
    behind its `history` of questions and answers. Its field `system` is the first message."""
    key = data.messages_key or next((key for key in KEYS if key in record.fields), None)
    if key is None and ROW[0] in record.fields and ROW[2] in record.fields:
        asked, more, answer = (cell(record, name) for name in ROW)
        pairs = [*(listed(record, "history", "[question, answer]") or ()), [f"{asked}\n\n{more}" if more else asked, answer]]
        if odd := [pair for pair in pairs if not isinstance(pair, list | tuple) or [*map(type, pair)] != [str, str]]:
            record.refuse(f"history has {str(odd[0])[:60]!r}", "a list of [question, answer]")
        messages = [{"role": role, "content": said} for a, b in pairs for role, said in (("user", a), ("assistant", b))]
    else:
        given = unfilled(record, record.get(key := key or KEYS[0], "data.messages_key"))
        given = listed(record, key, "messages") if isinstance(given, str) else given
        if not isinstance(given, list) or not given or not all(isinstance(message, Mapping) for message in given):
            record.refuse(f"{key} is {str(given)[:60]!r}", 'a list of {"role": ..., "content": ...}')
        messages = [message_of(record, message) for message in given]
    system = record.fields.get("system")
    if not system or {"role": "system", "content": system} == messages[0]:
        return messages
    if not isinstance(system, str) or messages[0]["role"] == "system":
        record.refuse(f"system is {repr(system)[:60]}", "text, or none where the first message is the system's")
    return [{"role": "system", "content": system}, *messages]


def cell(record: Record, name: str) -> str:
    """A field of Alpaca's row: text, a number, or nothing."""
    value = record.fields.get(name)
    if not isinstance(value, str | int | float | None):
        record.refuse(f"{name} is {str(value)[:60]!r}", "text")
    return "" if value is None else str(value)


def tools_of(record: Record) -> Any:
    """The tools that a conversation may call, those that it calls `functions`, as OpenAI once did, among them."""
    tools, functions = listed(record, "tools", "tools"), listed(record, "functions", "functions")
    if tools and functions:
        record.refuse("tools, and functions too", "tools alone")
    return tools or (functions and [{"type": "function", "function": function} for function in functions])


def listed(record: Record, key: str, of: str) -> list[Any] | None:
    """The list in the field `key`, which may be JSON, because a table can hold it only so; None without."""
    given = unfilled(record, next(reached(record.fields, key), None))
    found = record.loaded(key, given, f"a list of {of}, or its JSON")
    if not isinstance(found, list | None):
        record.refuse(f"{key} is {str(found)[:60]!r}", f"a list of {of}, or its JSON")
    return found


def unfilled(record: Record, value: Any) -> Any:
    """`value` as its writer gave it: without the nulls that a table puts into each mapping for the fields that another row's has,
    such as the arguments of another tool."""
    if record.unit == "row" and isinstance(value, list):
        return [unfilled(record, one) for one in value]
    if record.unit == "row" and isinstance(value, dict):
        return {key: unfilled(record, one) for key, one in value.items() if one is not None}
    return value


def message_of(record: Record, message: Mapping[str, Any]) -> dict[str, Any]:
    """One message without its null values, as transformers' templates get it: what OpenAI once called `function_call` and the role
    `function` by its later names."""
    if "role" not in message and "from" in message:
        if message["from"] not in list(SHAREGPT):  # it may be a list itself, which is no key
            record.refuse(f"a turn is from {message['from']!r}", f"one of {', '.join(SHAREGPT)}")
        message = {"role": SHAREGPT[message["from"]], "content": message.get("value"), "weight": message.get("weight")}
    if call := message.get("function_call"):
        if message.get("tool_calls"):
            record.refuse("a message has tool_calls, and function_call too", "tool_calls alone")
        message = {**message, "function_call": None, "tool_calls": [{"type": "function", "function": call}]}
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    if not isinstance(message.get("role"), str) or (message.get("content") is None and not message.get("tool_calls")):
        null = ", ".join(str(name) for name, value in message.items() if value is None and name in ("role", "content"))
        found = f"a message whose {null} is null" if null else f"a message has the fields {', '.join(map(str, message))}"
        record.refuse(found, "a role and a content")
    message = {**message, "role": SHAREGPT.get(message["role"], message["role"])}  # `human` is what `user` is, under either key
    if message["role"] != "tool":  # whose content may be anything: templates write its JSON
        message = {**message, "content": content_of(record, message)}
    weight = message.get("weight")
    if weight not in (None, 0, 1) or (weight and message["role"] != "assistant"):
        record.refuse(f"a message of {message['role']} has the weight {weight!r}", "0 or 1, and 1 only for the assistant's")
    return {name: value for name, value in message.items() if value is not None}


def content_of(record: Record, message: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """What a message says: a text, or a list of texts, as where there could be images too, which no model here sees."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind != "text" or not isinstance(text, str):
            said = f"{str(part)[:60]!r}" if kind in (None, "text") else f"a part of type {kind!r}"
            found = f"the content of a message of {message['role']} holds {said}"
            record.refuse(found, 'text, or a list of {"type": "text", "text": ...}')
        texts.append({"type": "text", "text": text})  # without the null fields that a table gives each part
    return texts


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing, and calls nothing either."""
    return not (joined(message).get("content") or "").strip() and not message.get("tool_calls")
