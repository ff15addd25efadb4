"""Conversations: text and mask as transformers' apply_chat_template has them, rows of every kind, what no template may do."""

import json
import random
import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import ByteLevel, TemplateProcessing

import modelcenter as mc
from modelcenter.cli.generate import ids_of, messages_of
from modelcenter.data.chat import NAMED, Template
from modelcenter.data.collate import IGNORED
from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Loader
from modelcenter.data.objective import find_objective, make_examples, texts_of
from modelcenter.data.objectives.chat import conversation
from modelcenter.data.read import read_records
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_open import load_tokenizer, open_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError
from modelcenter.generate.options import several
from modelcenter.train.prepare import end_at
from modelcenter.train.read import load_recipe

TEXT = "To be, or not to be, that is the question. Whether 'tis nobler: 2 + 2 = 4.\n\nnaïve café 中文 🙂 " * 3
TURNS = ["hi", "2 + 2?", "", "  spaces  ", "naïve 中文 🙂", "to be\n\nor not", "<|im_end|> inside", "café " * 9]
INST = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ '<<SYS>>' + m['content'] + '<</SYS>>' }}"
        "{% elif m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
        "{% else %}{{ raise_exception('no such role: ' + m['role']) }}{% endif %}{% endfor %}")  # fmt: skip
TOOLS = ("{%- if tools %}{{ tools | tojson(indent=2) }}{%- endif %}{%- set ns = namespace(n=0) %}{%- for m in messages -%}\n"
         "{%- set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.role }}:{% if m.role == 'assistant' %}{%- generation -%} {{ m.content }}"
         "{%- if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}{%- endgeneration -%}\n"
         "{% else %}{{ m.content }}{% endif %}{%- if loop.last %}{% break %}{% endif %}{%- endfor %}")  # fmt: skip
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TEMPLATES = {"chatml": NAMED["chatml"][0], "plain": NAMED["plain"][0], "inst": INST, "tools": TOOLS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_tokenizer([TEXT], 400, "bpe")
    made.raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def with_template(tokenizer: Tokenizer, source: str, folder: Path) -> tuple[Tokenizer, Any]:
    """Ours, as read back from a folder, and transformers' of the same folder."""
    made = Tokenizer(tokenizer.raw, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    made.chat_template = source
    made.save(folder)
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def talks(seed: int, count: int = 60) -> list[list[dict[str, Any]]]:
    """Conversations of one to five exchanges, some with a system turn, some that end in a question."""
    draw, out = random.Random(seed), []
    for _ in range(count):
        turns = [{"role": "system", "content": draw.choice(TURNS)}] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 5)):
            turns += [{"role": role, "content": draw.choice(TURNS)} for role in ("user", "assistant")]
        out.append(turns if draw.random() < 0.8 else [*turns, {"role": "user", "content": "and?"}])
    return out


def rows(conversations: list[Any], **more: Any) -> list[Record]:
    return [Record({"messages": turns, **more}, "f", n) for n, turns in enumerate(conversations, 1)]


@pytest.mark.filterwarnings("ignore:.* answers of the assistant are empty")
@pytest.mark.parametrize("name", ["chatml", "plain", "tools"])
def test_ids_and_mask_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    ours, theirs = with_template(tokenizer, TEMPLATES[name], tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds <numbers>.", "parameters": {}}}]
    for given in (None, tools):
        asked = talks(1)
        if name == "tools":  # a call in place of words
            asked.append([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None, "tool_calls": [{"é": 1}]}])
        examples = make_examples("chat", rows(asked, tools=given), ours, DataConfig(seq_len=4000))
        assert len(examples) == len(asked)
        for k, turns in enumerate(asked):
            said = [{**turn, "content": turn["content"] or ""} for turn in turns]  # transformers 5.17 would write "None"
            wanted = theirs.apply_chat_template(said, tools=given, return_dict=True, return_assistant_tokens_mask=True)
            ids, labels = examples.at(0, k)
            assert ids.tolist() == wanted["input_ids"]
            assert (labels != IGNORED).astype(int).tolist() == wanted["assistant_masks"]
            assert labels[labels != IGNORED].tolist() == ids[labels != IGNORED].tolist()


@pytest.mark.parametrize("name", ["chatml", "plain", "inst"])
def test_prefix_differences_are_what_a_template_marks(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    """Of a template without {% generation %}: what each turn of the assistant adds to what it was asked with, and no more."""
    marked, _ = with_template(tokenizer, TEMPLATES[name], tmp_path / "a")
    source = TEMPLATES[name].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    ours, theirs = with_template(tokenizer, source, tmp_path / "b")
    for record in rows(talks(2)):
        turns = record.fields["messages"]
        ((text, spans),) = Template(ours).marked_texts(record, turns)
        assert text == theirs.apply_chat_template(turns, tokenize=False)
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        end = {"chatml": "<|im_end|>\n", "plain": "<|endoftext|>\n\n", "inst": "<|endoftext|>"}[name]
        strip = str.strip if name == "inst" else str
        lead = "" if name == "chatml" else " "
        assert [text[a:b] for a, b in spans] == [lead + strip(answer) + end for answer in answers]
        if name != "inst":  # where it marks, the line's end behind a turn is not the assistant's
            ((again, narrow),) = Template(marked).marked_texts(record, turns)
            assert again == text and [(a, b + len(end.split(">")[-1])) for a, b in narrow] == spans


@pytest.mark.filterwarnings("ignore:.* answers of the assistant are empty")
def test_the_named_templates_are_kept_with_the_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    bare = Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"})
    examples = make_examples("chat", rows(talks(3)), bare, DataConfig(chat_template="plain", seq_len=4000))
    bare.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert theirs.apply_chat_template(asked, tokenize=False) == "User: hi\n\nAssistant: yes<|endoftext|>\n\n"
    assert theirs.apply_chat_template(asked[:1], tokenize=False, add_generation_prompt=True) == "User: hi\n\nAssistant:"
    batch = examples.collate([make_examples("chat", rows([asked]), bare, DataConfig()).at(0, 0)])
    shown = find_objective("chat").sample(batch, bare, None)
    assert shown == "User: hi\n\nAssistant:[[ yes<|endoftext|>]]\n\n"


def test_instruct_keeps_a_template_that_is_there(tokenizer: Tokenizer) -> None:
    """Or a chat model would unlearn how it is asked, and its folder be given another template."""
    name = load_recipe("instruct", {"data.path": "x.jsonl", "output_dir": "x"}).data.chat_template
    own, bare = (Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"}) for _ in range(2))
    own.chat_template = INST
    for made, wanted in ((own, INST), (bare, NAMED["plain"][0])):
        Template(made, name)
        assert made.chat_template == wanted


def test_where_a_folder_keeps_its_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for k, how in enumerate(("list", "file")):
        with_template(tokenizer, "x", folder := tmp_path / str(k))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        if how == "list":
            config["chat_template"] = [{"name": "rag", "template": "r"}, {"name": "default", "template": INST}]
        else:
            (folder / "chat_template.jinja").write_text(INST + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False)
        assert Template(load_tokenizer(folder)).marked_texts(rows([turns])[0], turns)[0][0] == theirs


FORGETS = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and not loop.last %}"
           "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")  # fmt: skip
ENDS = (NAMED["chatml"][0].replace("{% generation %}", "").replace("{% endgeneration %}", "")
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}")  # fmt: skip


@pytest.mark.parametrize("name", ["forgets", "ends"])
def test_a_template_that_writes_a_turn_otherwise_later_has_a_text_a_turn(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    """What Qwen3's does with thoughts, Phi-3's with the end of text: each turn is learned behind what the model is asked with."""
    ours, theirs = with_template(tokenizer, {"forgets": FORGETS, "ends": ENDS}[name], tmp_path)
    turns: list[dict[str, Any]] = []
    for n in range(3):
        turns += [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"<think>{n}</think>yes {n}"}]
    examples = make_examples("chat", rows([turns, turns[:2]]), ours, DataConfig(seq_len=4000))
    found = [[side.tolist() for side in examples.at(0, k)] for k in range(len(examples))]
    assert len(found) == 4
    for (ids, labels), until in zip(found, (2, 4, 6, 2), strict=True):
        asked = theirs.apply_chat_template(turns[: until - 1], add_generation_prompt=True, return_dict=False)
        assert ids == theirs.apply_chat_template(turns[:until], return_dict=False) and ids[: len(asked)] == asked
        assert labels == [IGNORED] * len(asked) + ids[len(asked) :]


def test_nothing_predicts_the_first_token(tokenizer: Tokenizer) -> None:
    """Where the assistant begins, and the template writes nothing before it: in a packed row another conversation would."""
    made = Tokenizer(tokenizer.raw, tokenizer.special)
    made.chat_template = ("{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
                          "{% else %}{{ m.content }}{% endif %}{% endfor %}")
    turns = [[{"role": "assistant", "content": "to be, or not"}, *ASKED]] * 2
    ids, labels = make_examples("chat", rows(turns), made, DataConfig()).at(0, 0)
    assert labels[0] == IGNORED and labels[1] == ids[1]


def test_spaces_that_end_an_answer_are_trained_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Also where the tokenizer leaves spaces out of the ranges that it tells, as LLaMA 3's does."""
    told = []
    for trims in (False, True):
        made = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.raw.to_str()), tokenizer.special)
        made.raw.post_processor = ByteLevel(trim_offsets=trims)
        made.chat_template = ("{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
                              "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}")
        turns = [[ASKED[0], {"role": "assistant", "content": said}] for said in ("yes ", "  yes  ", "\nyes\n ", "no")]
        examples = make_examples("chat", rows(turns), made, DataConfig())
        told.append([examples.at(0, k)[1].tolist() for k in range(len(turns))])
    assert told[0] == told[1]
    assert [tokenizer.decode([i for i in row if i != IGNORED]) for row in told[1][:2]] == ["yes ", "  yes  "]


def test_tools_as_json(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As tables hold them: a template would have read the text letter by letter."""
    ours, _ = with_template(tokenizer, TOOLS, tmp_path)
    tools = [{"name": "add", "parameters": {}}]
    plain, told, none = (make_examples("chat", rows([ASKED], tools=given), ours, DataConfig()).at(0, 0)[0].tolist()
                         for given in (tools, json.dumps(tools), ""))
    assert plain == told and len(none) < len(told)
    for odd, said in (("add", "tools is add, text that is no"), ({"name": "add"}, "tools is "), ("3", "tools is '3'; a list")):
        with pytest.raises(InputError, match=f"f: line 1: {said}"):
            make_examples("chat", rows([ASKED], tools=odd), ours, DataConfig())


def test_functions_are_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """OpenAI's older names of them, which no template reads: what it says of them is what transformers says of the later ones."""
    ours, theirs = with_template(tokenizer, TOOLS, tmp_path)
    add, call = {"name": "add", "parameters": {"a": {}}}, {"name": "add", "arguments": '{"a": 1}'}
    before = [ASKED[0], {"role": "assistant", "content": None, "function_call": call},
              {"role": "function", "name": "add", "content": "4"}, {"role": "assistant", "content": "4", "function_call": None}]
    now = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
           {"role": "tool", "name": "add", "content": "4"}, {"role": "assistant", "content": "4"}]  # fmt: skip
    wanted = theirs.apply_chat_template(now, tools=[{"type": "function", "function": add}], return_dict=True)["input_ids"]
    for functions in ([add], json.dumps([add])):
        examples = make_examples("chat", rows([before], functions=functions, tools=None), ours, DataConfig(seq_len=4000))
        assert examples.at(0, 0)[0].tolist() == wanted
    both = [{**before[1], "tool_calls": now[1]["tool_calls"]}]
    for turns, more, said in ((now, {"functions": [add], "tools": [add]}, "tools, and functions too"),
                              (both, {}, "a message has tool_calls, and function_call too")):
        with pytest.raises(InputError, match=f"f: line 1: {said}; "):
            make_examples("chat", rows([turns], **more), ours, DataConfig())


@pytest.mark.parametrize("name", ["chatml", "inst", "forgets"])
def test_a_turn_of_weight_0_is_read_and_not_trained_on(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    """As in OpenAI's files; also among ShareGPT's turns, and where the template marks nothing or writes a turn otherwise later."""
    ours, _ = with_template(tokenizer, {"forgets": FORGETS, **TEMPLATES}[name], tmp_path)
    said = ["<think>a</think>one", "<think>b</think>two", "<think>c</think>three"]
    turns = [{"role": role, "content": text} for n in range(3) for role, text in (("user", f"{n}?"), ("assistant", said[n]))]

    def learned(weights: tuple[Any, ...]) -> tuple[list[str], set[tuple[int, ...]]]:
        told = [{**turn, "weight": weights[k // 2]} if k % 2 else turn for k, turn in enumerate(turns)]
        shared = [{"from": turn["role"], "value": turn["content"], "weight": turn.get("weight")} for turn in told]
        both = [make_examples("chat", records, ours, DataConfig(seq_len=4000)) for records in
                (rows([told]), [Record({"conversations": shared}, "f", 1)])]  # fmt: skip
        one, two = ([[side.tolist() for side in examples.at(0, k)] for k in range(len(examples))] for examples in both)
        assert one == two
        words = [tokenizer.decode([i for i in labels if i != IGNORED]) for _, labels in one]
        return [text for text in said if any(text in part for part in words)], {tuple(ids) for ids, _ in one}

    whole, texts = learned((None, 1, 1))
    assert whole == said
    for weights in ((0, 1, 1), (1, 0, None), (0, 0, 1), (0, 1, 0)):
        found, read = learned(weights)
        assert found == [text for text, weight in zip(said, weights, strict=True) if weight != 0]
        assert read <= texts
    with pytest.raises(InputError, match="no token of the assistant to train on"):
        learned((0, 0, 0))


def test_odd_weights(tokenizer: Tokenizer) -> None:
    made = Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"})
    for turns, said in (([ASKED[0], {**ASKED[1], "weight": 0.5}], "a message of assistant has the weight 0.5; 0 or 1"),
                        ([{**ASKED[0], "weight": 1}, ASKED[1]], "a message of user has the weight 1; 0 or 1, and 1 only")):
        with pytest.raises(InputError, match=f"f: line 1: {said}"):
            make_examples("chat", rows([turns]), made, DataConfig(chat_template="plain"))
    made.chat_template = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(InputError, match="marks 1 turns of 2, some of them of weight 0"):
        make_examples("chat", rows([[*ASKED, ASKED[0], {**ASKED[1], "weight": 0}]]), made, DataConfig())


@pytest.mark.parametrize("fields", [
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"messages": ASKED}, {"instruction": "q", "input": None, "output": "a"},
])  # fmt: skip
def test_a_row_s_system_is_the_first_message(fields: dict[str, Any]) -> None:
    """LLaMA-Factory's column, also of a table in which other rows have none."""
    one = {"role": "system", "content": "s"}
    assert conversation(Record({**fields, "system": "s"}, "f", 1), DataConfig()) == [one, *ASKED]
    for none in ("", None):
        assert conversation(Record({**fields, "system": none}, "f", 1), DataConfig())[-2:] == ASKED
    with pytest.raises(InputError, match="f: line 1: system is 3; text"):
        conversation(Record({**fields, "system": 3}, "f", 1), DataConfig())
    if "from" in str(fields) and len(fields["conversations"]) == 3:
        with pytest.raises(InputError, match="system is 'other'; text, or none where the first message is the system's"):
            conversation(Record({**fields, "system": "other"}, "f", 1), DataConfig())


def test_alpaca_s_history_comes_before_the_question() -> None:
    row, pairs = {"instruction": "q", "input": "", "output": "a"}, [["1", "one"], ["2", "two"]]
    said = [("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two"), ("user", "q"), ("assistant", "a")]
    for history in (pairs, json.dumps(pairs)):
        found = conversation(Record({**row, "history": history}, "f", 1), DataConfig())
        assert found == [{"role": role, "content": text} for role, text in said]
    for none in ([], None, "", "[]"):
        assert conversation(Record({**row, "history": none}, "f", 1), DataConfig()) == ASKED
    for odd in ([["1"]], ["12"], [["1", None]], "x", {"1": "2"}):
        with pytest.raises(InputError, match="f: line 1: history "):
            conversation(Record({**row, "history": odd}, "f", 1), DataConfig())


@pytest.mark.parametrize("fields", [
    {"messages": [{"role": "user", "content": "q\n\nx"}, {"role": "assistant", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "q\n\nx"}, {"from": "gpt", "value": "a"}]},
    {"talk": [{"from": "human", "value": "q\n\nx"}, {"role": "assistant", "content": "a", "name": None}]},
    {"instruction": "q", "input": "x", "output": "a"},
    {"instruction": "q\n\nx", "input": "", "output": "a", "messages_": 1},
    {"messages": [{"role": "human", "content": "q\n\nx"}, {"role": "gpt", "content": "a"}]},
    {"messages": '[{"role": "user", "content": "q\\n\\nx"}, {"role": "assistant", "content": "a"}]'},
    {"row": {"talk": '[{"role": "user", "content": "q\\n\\nx"}, {"role": "assistant", "content": "a"}]'}},
])  # fmt: skip
def test_rows_of_every_kind(fields: dict[str, Any]) -> None:
    data = DataConfig(messages_key="talk" if "talk" in fields else "row.talk" if "row" in fields else None)
    record = Record(fields, "f", 1)
    assert conversation(record, data) == [{"role": "user", "content": "q\n\nx"}, {"role": "assistant", "content": "a"}]
    assert list(texts_of("chat", [record], data)) == ["q\n\nx", "a"]


@pytest.mark.parametrize(("train", "use"), [(True, "trained on"), (False, "judged")])
def test_answers_without_words_are_told(tokenizer: Tokenizer, train: bool, use: str) -> None:
    """The end of text behind them would be taught silently: that is how a model learns to say nothing."""
    made = Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"})
    made.chat_template = TOOLS
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    full = [[*ASKED], [ASKED[0], call], [*ASKED, ASKED[0], {"role": "assistant", "content": "", "weight": 0}]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_examples("chat", rows(full), made, DataConfig(seq_len=99), train=train)
    none: list[dict[str, Any]] = [{"instruction": "q", "output": said} for said in ("a", "", None, " \n", 0)]
    for said in ("", [{"type": "text", "text": " "}]):
        none.append({"messages": [*ASKED, ASKED[0], {"role": "assistant", "content": said}]})
    records = [Record(row, "f", n) for n, row in enumerate(none, 1)]
    with pytest.warns(UserWarning, match=f"^5 of 9 answers of the assistant are empty .first: f, line 2.: {use} as they are$"):
        make_examples("chat", records, made, DataConfig(seq_len=99, chat_template="plain"), train=train)


def test_alpaca_s_fields_are_texts_or_numbers() -> None:
    assert conversation(Record({"instruction": "1 - 1?", "output": 0}, "f", 1), DataConfig())[-1]["content"] == "0"
    for name in ("instruction", "input", "output"):
        with pytest.raises(InputError, match=rf'f: line 1: {name} is "\[\'x\'\]"; text'):
            conversation(Record({"instruction": "q", "output": "a", name: ["x"]}, "f", 1), DataConfig())


LISTS = ("{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
         "{{ '<image>' if 'image' in part else part.text }}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip


@pytest.mark.parametrize(("source", "between"), [(TEMPLATES["plain"], " "), (INST, " "), (LISTS, "")],
                         ids=["plain", "inst", "lists"])
def test_a_content_may_be_a_list_of_texts(tokenizer: Tokenizer, tmp_path: Path, source: str, between: str) -> None:
    """A template that knows lists gets them, as from transformers; any other the texts as one, as from transformers' server."""
    ours, theirs = with_template(tokenizer, source, tmp_path)

    def turns(*said: Any) -> list[dict[str, Any]]:
        return [{"role": role, "content": content} for role, content in zip(("user", "assistant"), said, strict=True)]

    parts = [[{"type": "text", "text": text, "image": None} for text in texts] for texts in (("to", "be"), ("or",))]
    records = rows([turns(*parts), turns(f"to{between}be", "or")])
    one, other = (make_examples("chat", [record], ours, DataConfig(seq_len=99)).at(0, 0) for record in records)
    assert [side.tolist() for side in one] == [side.tolist() for side in other]
    if source == LISTS:
        bare = turns(*([{"type": "text", "text": part["text"]} for part in content] for content in parts))
        assert theirs.apply_chat_template(bare, return_dict=False) == one[0].tolist()
    assert list(texts_of("chat", records[:1], DataConfig())) == ["to be", "or"]
    talk = messages_of(records[0], "prompt", False)
    assert ids_of(ours, Template(ours), records[0], "prompt", talk)[: len(one[0])] == one[0].tolist()


@pytest.mark.parametrize(("content", "said"), [
    ([{"type": "image", "image": "a.png"}], "a part of type 'image'"), (["a"], "'a'"), (3, "'3'"), ({"a": 1}, "\"{'a': 1}\""),
    ([{"type": "text", "text": "a"}, {"type": "image_url"}], "a part of type 'image_url'"),
    ([{"type": "text", "text": None}], "\"{'type': 'text', 'text': None}\""),
])  # fmt: skip
def test_a_content_of_anything_else_is_refused(tokenizer: Tokenizer, content: Any, said: str) -> None:
    for role in ("user", "assistant"):
        turns = [{**turn, "content": content} if turn["role"] == role else turn for turn in ASKED]
        with pytest.raises(InputError, match=f"f: line 1: the content of a message of {role} holds {re.escape(said)}; text, or a"):
            make_examples("chat", rows([turns]), tokenizer, DataConfig(chat_template="plain"))
    made = Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"})
    made.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content | tojson }}{% endfor %}"
    record = rows([[ASKED[0], {"role": "tool", "content": content}, ASKED[1]]])[0]  # of a tool templates write the JSON
    assert json.dumps(content) in Template(made).text(record, conversation(record, DataConfig()))


def test_a_role_that_few_templates_know_is_told(tokenizer: Tokenizer) -> None:
    """The plain template writes any; `usr` would be taught as a speaker of its own."""
    turns = [{"role": "usr", "content": "hi"}, {"role": "assistant", "content": "to be"}]
    with pytest.warns(UserWarning, match="f: messages of usr, which few templates know: did you mean 'user'"):
        make_examples("chat", rows([turns]), tokenizer, DataConfig(seq_len=99, chat_template="plain"))


def test_a_long_conversation_loses_its_end_and_one_without_an_answer_is_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours, _ = with_template(tokenizer, TEMPLATES["chatml"], tmp_path)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "to be or not " * 9}]
    whole, part = (make_examples("chat", rows([turns]), ours, DataConfig(seq_len=n)).at(0, 0) for n in (4000, 20))
    for side in (0, 1):
        assert part[side].tolist() == whole[side][:20].tolist()
    mute = [{"role": "user", "content": "to be or not " * 9}, turns[1]]
    with (pytest.warns(UserWarning, match="2 of 3 conversations have no token of the assistant to train on within 20: left out"),
          pytest.warns(UserWarning, match="^1 of 1 other conversations are longer than data.seq_len 20: what the assistant says")):
        examples = make_examples("chat", rows([mute, turns, mute]), ours, DataConfig(seq_len=20))
    with warnings.catch_warnings(record=True) as told:  # what the assistant does not say is not trained on anyway
        warnings.simplefilter("always")
        size = len(whole[0]) - 1  # without the template's last line end
        longer = [*turns, {"role": "user", "content": "to be or not " * 99}]
        make_examples("chat", rows([turns, longer]), ours, DataConfig(seq_len=size))
    assert not told
    assert len(examples) == 1 and examples.at(0, 0)[0].tolist() == part[0].tolist()
    with pytest.raises(InputError, match=r"f: data\.seq_len: .* to train on within 20 tokens of any of the 1 conversations"):
        make_examples("chat", rows([mute]), ours, DataConfig(seq_len=20))
    with pytest.raises(InputError, match="to evaluate on within 20 tokens of any of the 1 conversations"):
        make_examples("chat", rows([mute]), ours, DataConfig(seq_len=20), train=False)


@pytest.mark.filterwarnings("ignore:.* answers of the assistant are empty")
@pytest.mark.parametrize("packing", [False, True], ids=["padding_free", "packing"])
def test_packed_conversations_are_the_same_sequences(tokenizer: Tokenizer, tmp_path: Path, packing: bool) -> None:
    ours, _ = with_template(tokenizer, TEMPLATES["chatml"], tmp_path)
    records = rows([turns[:4] for turns in talks(4)])
    plain = make_examples("chat", records, ours, DataConfig(seq_len=200))
    how = make_examples("chat", records, ours, DataConfig(seq_len=200, packing=packing, padding_free=not packing))
    found = []
    for batch in Loader(how, how.collate, batch=4).once():
        bounds = batch["cu_seq_lens_q"].tolist()
        for a, b in pairwise(bounds):
            found.append((batch["input_ids"][0, a:b].tolist(), batch["labels"][0, a:b].tolist()))
            assert found[-1][1][0] == IGNORED
    wanted = [tuple(side.tolist() for side in plain.at(0, k)) for k in range(len(plain))]
    assert sorted(found) == sorted(wanted)
    row = plain.collate([plain.at(0, 0), plain.at(0, 1)])
    assert torch.equal(row["labels"] != IGNORED, (row["labels"] == row["input_ids"]) & (row["labels"] != IGNORED))


@pytest.mark.parametrize(("source", "turns", "said"), [
    (INST, [{"role": "critic", "content": "q"}], "f: line 1: the chat template refuses it .no such role: critic"),
    (INST, [{"role": "user"}], "a message has the fields role"),
    (INST, [], "messages is"), (INST, ["q"], "messages is"), (INST, [{"content": "q"}], "a message has the fields content"),
    (INST, [{"from": "alien", "value": "x"}], "a turn is from 'alien'"),
    (INST, [{"role": "user", "content": "\ufdd0"}, ASKED[1]], r"U\+FDD0"),
    ("{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}", ASKED, "asks for turn 2 in other words"),
    ("{% for m in messages %}", ASKED, "chat_template: not a template"),
    ("{{ messages.__class__.__mro__ }}", ASKED, "refuses it .access to attribute '__class__'"),
    ("{% set _ = messages.append(1) %}", ASKED, "access to attribute 'append'"),
    ("{% set n = namespace(__class__=1) %}", ASKED, "a namespace holds '__class__'"),
    ("{% set n = namespace() %}{% set n.__call__ = 1 %}", ASKED, "a namespace holds '__call__'"),
    ("{{ 1 / 0 }}", ASKED, "refuses it .division by zero"),
    (None, ASKED, r"objective: chat with a tokenizer that has no chat template; data\.chat_template=chatml or plain"),
    (INST, "[{", r"messages is \[{, text that is not JSON"),
    pytest.param(INST, "[" * 100_000, r"messages is \[+, text that is not JSON", id="nested"),
    (INST, r'[{"role": "user", "content": "\ud800"}]', "text that is not JSON .*surrogates"),
    (INST, [ASKED[0]], "no message of the assistant in any of 1 conv.*, only of user"),
    (INST, [ASKED[0], {"role": "assistant", "content": None}], "line 1: a message whose content is null; a role and a content"),
    (INST, [{"from": ["human"], "value": "x"}], r"line 1: a turn is from \['human'\]; one of human, user"),
])  # fmt: skip
def test_refusals(tokenizer: Tokenizer, source: str | None, turns: Any, said: str) -> None:
    made = Tokenizer(tokenizer.raw, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    made.chat_template = source
    with pytest.raises(InputError, match=said) as error:
        make_examples("chat", rows([turns]), made, DataConfig())
    assert "\n" not in str(error.value)


def test_a_call_that_the_template_leaves_out_is_refused(tokenizer: Tokenizer) -> None:
    """Or the answer would be learned that nothing is said in its place."""
    made = Tokenizer(tokenizer.raw, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    for name, said in (("chatml", ""), ("plain", "I look."), ("plain", "")):
        asked = [ASKED[0], {"role": "assistant", "content": said, **call}, {"role": "tool", "content": "4"}, ASKED[1]]
        with pytest.raises(InputError, match=f"f: line 1: the chat template {name} leaves out tool_calls: .*; one that does, or"):
            make_examples("chat", rows([asked]), made, DataConfig(chat_template=name))
        assert len(make_examples("chat", rows([[ASKED[0], {**ASKED[1], "tool_calls": []}]]), made, DataConfig())) == 1
    # a template that writes a call where there is one, and fails on a message without words
    made.chat_template = ("{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m['content'] + '' }}\n{% endfor %}"
                          "{% if add_generation_prompt %}{% endif %}")
    assert len(make_examples("chat", rows([[ASKED[0], {"role": "assistant", **call}]]), made, DataConfig())) == 1


@pytest.mark.parametrize("older", [False, True], ids=["tools", "functions"])
def test_the_nulls_of_a_table_are_no_arguments(tokenizer: Tokenizer, tmp_path: Path, older: bool) -> None:
    """Arrow gives each struct the fields of all, at any depth; those of a file of JSON lines somebody wrote."""
    made = Tokenizer(tokenizer.raw, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    made.chat_template = TOOLS
    lines = []
    for name, key, value in (("get", "city", "Paris"), ("time", "zone", {"hours": [1]}), ("time", "zone", {"name": "CET"})):
        call, tool = {"name": name, "arguments": {key: value}}, {"name": name, "parameters": {"properties": {key: {"type": "x"}}}}
        if not older:
            call, tool = ({"type": "function", "function": one} for one in (call, tool))
        asked = {"role": "assistant", "content": None, **({"function_call": call} if older else {"tool_calls": [call]})}
        lines.append({"messages": [ASKED[0], asked, ASKED[1]], "functions" if older else "tools": [tool]})
    lines[0]["messages"][1] = {**lines[0]["messages"][1], "content": "I look."}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = pytest.importorskip("pyarrow").Table.from_pylist(lines)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    pytest.importorskip("datasets").Dataset(table).save_to_disk(tmp_path / "saved")
    wanted, *found = ([tuple(side.tolist() for side in examples.at(0, k)) for k in range(3)]
                      for name in ("a.jsonl", "a.parquet", "saved")
                      for examples in [make_examples("chat", read_records(str(tmp_path / name)), made, DataConfig(seq_len=999))])
    assert found == [wanted, wanted]
    lines[0]["messages"] = json.dumps([ASKED[0], {"role": "assistant", "content": "", "tool_calls": [{"a": None}]}])
    for unit in ("line", "row"):  # written as text, also in a table
        assert conversation(Record(lines[0], "f", 1, unit=unit), DataConfig())[1]["tool_calls"] == [{"a": None}]


def test_a_named_template_that_has_no_words_for_a_call_is_named(tokenizer: Tokenizer) -> None:
    made = Tokenizer(tokenizer.raw, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(InputError, match="f: line 1: the chat template plain refuses it"):
        make_examples("chat", rows([[ASKED[0], call]]), made, DataConfig(chat_template="auto"))


def test_a_named_template_needs_its_tokens() -> None:
    bare = train_tokenizer([TEXT], 300, "roberta")
    with pytest.raises(InputError, match=r"data\.chat_template: chatml with a tokenizer that has no <\|im_start\|>"):
        make_examples("chat", rows([ASKED]), bare, DataConfig(chat_template="chatml"))
    with pytest.raises(InputError, match=r"data\.chat_template: 'chatm'; did you mean 'chatml'"):
        make_examples("chat", rows([ASKED]), bare, DataConfig(chat_template="chatm"))
    letters = open_tokenizer("char", ["Userqa: \n"])
    with pytest.raises(InputError, match="has no end of text; another template, or a tokenizer that has it"):
        make_examples("chat", rows([ASKED]), letters, DataConfig(chat_template="plain"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    """Messages, ShareGPT's among them, and texts that a user says."""
    ours, theirs = with_template(tokenizer, TEMPLATES[name], tmp_path)
    template, tools = Template(ours), [{"name": "add"}]
    for record in [*rows(talks(3)), *rows(talks(4), tools=tools)]:
        talk = messages_of(record, "prompt", False)
        wanted = theirs.apply_chat_template(record.fields["messages"], tools=record.fields.get("tools"), add_generation_prompt=True)
        assert ids_of(ours, template, record, "prompt", talk) == wanted["input_ids"]
    said = {"conversations": [{"from": "human", "value": "hi"}]}, {"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}
    for fields in said:
        record = Record(dict(fields), "f", 1)
        assert messages_of(record, "prompt", True) == [{"role": "user", "content": "hi"}]
    text = Record({"prompt": "hi"}, "f", 1)
    assert messages_of(text, "prompt", False) is None and ids_of(ours, template, text, "prompt", None) == ours.encode("hi")
    with pytest.raises(InputError, match=r"holds U\+FDD0"):
        template.prompt(text, [{"role": "user", "content": "\ufdd0"}])


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_begins_as_the_tokenizer_begins_texts(name: str, tmp_path: Path) -> None:
    """LLaMA's puts <s> before every text: what it was trained on has none without. GPT-2's has such a token and does not."""
    for before in (True, False):
        made = train_tokenizer([TEXT], 400, "bpe")
        made.raw.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
        if before:
            made.raw.post_processor = TemplateProcessing("<s> $A", None, [("<s>", made.raw.token_to_id("<s>"))])
        both = Tokenizer(made.raw, {"bos": "<s>", "eos": "<|endoftext|>"})
        ids = make_examples("chat", rows([ASKED]), both, DataConfig(chat_template=name)).at(0, 0)[0].tolist()
        assert (ids[0] == both.bos_id) == before and ids.count(both.bos_id) == before
        both.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.apply_chat_template(ASKED, return_dict=False) == ids


@pytest.mark.parametrize(("source", "end"), [
    (NAMED["chatml"][0], "<|im_end|>"), (FORGETS, "<|im_end|>"), (NAMED["plain"][0], "<|endoftext|>"), (INST, "<|endoftext|>"),
    ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None), ("{{ raise_exception('no') }}", None),
])  # fmt: skip
def test_what_ends_an_answer_ends_generation(tokenizer: Tokenizer, source: str, end: str | None) -> None:
    made = Tokenizer(tokenizer.raw, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    made.chat_template = source
    assert find_objective("chat").ends(made) == ((made.token_to_id(end),) if end else ())
    assert find_objective("lm").ends(made) == ()


@pytest.mark.parametrize(("known", "wanted"), [(None, [0, 401]), (0, [0, 401]), ([5, 0], [5, 0, 401]), ([0, 401], None)])
def test_what_ends_texts_is_said_beside_what_ends_an_answer(tokenizer: Tokenizer, known: Any, wanted: Any) -> None:
    """Where the model says nothing, the tokenizer's end of text too."""
    made = Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"})
    end = made.token_to_id("<|im_end|>")
    assert made.eos_id == 0 and end is not None
    model = mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 402})
    number = {401: end}
    told = [number.get(i, i) for i in known] if isinstance(known, list) else known
    model.companions = {} if known is None else {"generation_config.json": json.dumps({"eos_token_id": told}).encode()}
    assert end_at(model, made, ()) == []
    before = dict(model.companions)
    added = end_at(model, made, (end,))
    if wanted is None:
        assert added == [] and model.companions == before
    else:
        said = json.loads(model.companions["generation_config.json"])["eos_token_id"]
        assert said == [number.get(i, i) for i in wanted] and set(added) == set(said) - set(several(told))


def test_a_run_says_what_ends_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Or what it has trained would go on behind its answers, here and in transformers. What else stands in the file stays, be it
    what generation refuses here."""
    made = Tokenizer(tokenizer.raw, {"eos": "<|endoftext|>"})
    made.save(tmp_path / "base")
    base = mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "positions": 32, "vocab": made.vocab_size})
    base.companions = {"generation_config.json": json.dumps({"eos_token_id": made.eos_id, "guidance_scale": 2.0}).encode()}
    base.save_pretrained(tmp_path / "base" / "model")
    made.save(tmp_path / "base" / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": ASKED}) + "\n")
    for name, ends in (("chatml", ["<|endoftext|>", "<|im_end|>"]), ("plain", "<|endoftext|>")):
        mc.train("instruct", overrides={
            "model": str(tmp_path / "base" / "model"), "max_steps": 1, "batch": 1, "data.path": str(tmp_path / "chats.jsonl"),
            "data.chat_template": name, "data.eval_fraction": 0.0, "best": None, "output_dir": str(tmp_path / name),
            "schedule.warmup_steps": 0, "precision": "fp32"})  # fmt: skip
        said = json.loads((tmp_path / name / "model" / "generation_config.json").read_text())
        wanted = [made.token_to_id(end) for end in ends] if isinstance(ends, list) else made.token_to_id(ends)
        assert said == {"eos_token_id": wanted, "guidance_scale": 2.0}
        theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name / "model")
        assert theirs.generation_config.eos_token_id == wanted
