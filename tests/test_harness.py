"""lm-eval's own `hf` model on the same weights is the judge: log probabilities, greedy answers, texts, a whole task."""

import json
from pathlib import Path
from typing import Any

import pytest

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError

pytest.importorskip("lm_eval", reason="lm-eval is an extra: pip install modelcenter[lm-eval]")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own, and those of what it imports

WORDS = ["red", "blue", "cats", "dogs", "eat", "see", "the", "a", "big", "small"]
TEXTS = [" ".join(WORDS[(n * k + k) % 10] for k in range(1, 8)) for n in range(30)]
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt": ("gpt2", "bpe", {"layers": 2, "dim": 32, "heads": 2, "positions": 48}),
    "llama": ("llama-2-7b", "bpe", {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "hidden": 48, "positions": 48}),
    "t5": ("t5-small", "span", {"layers": 2, "dim": 32, "heads": 2, "head_dim": 16, "hidden": 48}),
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of loud weights with its tokenizer."""
    import torch

    preset, kind, config = SHAPES[request.param]
    here = tmp_path_factory.mktemp(request.param)
    tokenizer = train_tokenizer(TEXTS, 380, kind)
    model = mc.build(preset, config={**config, "vocab": len(tokenizer)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    special = {f"{role}_token_id": tokenizer.id(role) for role in ("bos", "eos", "pad") if tokenizer.id(role) is not None}
    model.save_pretrained(here)
    config_file = here / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | special))
    tokenizer.save(here)
    return here


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Any, Any]:
    """Our model in lm-eval, and lm-eval's own."""
    from lm_eval.models.huggingface import HFLM

    from modelcenter.train.harness import Harness

    kind = "seq2seq" if "t5" in folder.name else "causal"
    return Harness(str(folder), batch_size=3), HFLM(str(folder), batch_size=3, device="cpu", max_length=48, backend=kind)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, a, n) for n, a in enumerate(arguments)]


def test_log_probabilities(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    ours.max_length = theirs.max_length
    asked = [(text[: 5 + n], text[5 + n :]) for n, text in enumerate(TEXTS[:8])]
    asked += [("", "red cats"), ("blue dogs ", "eat"), (" ".join(TEXTS[:4]), " see the big"), ("the", " cats"), ("the", " dogs")]
    requests = instances("loglikelihood", *asked)
    found, wanted = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    assert [said for said, _ in found] == pytest.approx([said for said, _ in wanted], rel=1e-4, abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert len({round(said, 3) for said, _ in found}) > 8


def test_what_is_greedy_is_said(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    ids = [ours.tok_encode("the big")] * 200
    requests = [(None, context, [token]) for token, context in enumerate(ids, 3)]
    found = ours._loglikelihood_tokens(requests)
    wanted = theirs._loglikelihood_tokens([(("", str(n)), *ids) for n, (_, *ids) in enumerate(requests)])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted] and sum(greedy for _, greedy in found) <= 1


def test_whole_texts_in_windows(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    requests = instances("loglikelihood_rolling", (TEXTS[0],), (" ".join(TEXTS[:12]),), ("red",))
    found, wanted = ours.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-3)


def test_texts_are_written(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    first = ours.generate_until(instances("generate_until", (TEXTS[0], {"until": [], "max_gen_toks": 10})))[0]
    stop = next((c for c in first[1:] if c.isascii()), "a")  # half a character is another one a token later
    asked = [(text, {"until": [stop], "max_gen_toks": 10}) for text in TEXTS[:5]]
    asked += [(" ".join(TEXTS[:6]), {"until": [], "max_gen_toks": 12}), (TEXTS[1], {"until": ["zzz"], "max_gen_toks": 12})]
    requests = instances("generate_until", *asked)
    found = ours.generate_until(requests)
    wanted = theirs.generate_until(requests)
    if ours.backend == "seq2seq":  # theirs may write as many tokens more as the context has
        wanted = [text[: len(mine)] for text, mine in zip(wanted, found, strict=True)]
    assert found == wanted
    assert any(found) and not any(stop in text for text in found[:5])


TASK = """task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a task of twelve questions."""
    rows = [{"question": TEXTS[n][:9], "choices": [" cats", " dogs see"], "answer": n % 2} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colours.yaml").write_text(TASK.replace("FILE", str(tmp_path / "data.jsonl")))
    return tmp_path


def test_a_task_from_the_command_line(folder: Path, task: Path, both: tuple[Any, Any], capsys: pytest.CaptureFixture[str],
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", task / "cache")
    assert main(["evaluate", str(folder), "--lm-eval", "colours", f"lm_eval_path={task}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    manager = TaskManager(include_path=str(task), include_defaults=False)
    wanted = simple_evaluate(both[1], tasks=["colours"], task_manager=manager, bootstrap_iters=0)["results"]["colours"]
    assert found == {"colours": {"acc": wanted["acc,none"]}}
    assert main(["evaluate", str(folder), "--lm-eval", "colour", f"lm_eval_path={task}"]) == 2
    assert capsys.readouterr().err.endswith("modelcenter: error: lm_eval: colour; did you mean 'colours'?\n")


def test_a_model_that_sees_ahead_is_refused(tmp_path: Path) -> None:
    from modelcenter.train.harness import Harness

    tokenizer = train_tokenizer(TEXTS, 380, "span")
    tiny = {"layers": 1, "dim": 32, "heads": 2, "head_dim": 16, "hidden": 32, "prompt_length": 2, "vocab": len(tokenizer)}
    mc.build("cpm-ant-10b", config=tiny).save_pretrained(tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    with pytest.raises(InputError, match="model: its tokens see what follows them; a causal model"):
        Harness(str(tmp_path / "m"))
