"""What stands in examples/ does what it says; quickstart.py is `make quickstart`."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter.data.tokenizer import train_tokenizer

COUNT = ("one", "two", "three", "four", "five", "six", "seven", "eight")
TEXT = [" ".join(COUNT[(n + k) % 8] for k in range(8)) for n in range(8)] * 8  # a word that is replaced is known by its neighbours


def example(name: str) -> ModuleType:
    file = Path(__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("packing", ["true", "false"])
def test_replaced_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str) -> None:
    """It learns to tell by the words around. What it writes is an encoder with all weights, its pooler as before."""
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    sizes = {"layers": 1, "dim": 64, "heads": 2, "hidden": 128, "positions": 64, "vocab": 300, "dropout": 0.0, "attn_dropout": 0.0}
    bert = mc.build("bert-base-uncased", config=sizes, task="backbone", seed=1)
    bert.save_pretrained(tmp_path / "bert")
    train_tokenizer(TEXT, 300, "roberta").save(tmp_path / "bert")
    files = [f"model={tmp_path}/bert", f"data.path={tmp_path}/text.txt", f"output_dir={tmp_path}/run"]
    settings = [*files, "data.seq_len=10", f"data.packing={packing}", "batch=64", "max_steps=60", "num_epochs=null",
                "schedule.warmup_steps=4", "optimizer.lr=1e-3", "precision=fp32"]  # fmt: skip
    assert example("replaced_tokens").main(settings) == 0
    said = [re.findall(r"([0-9.]+)% ", line + " ") for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    wrong, share = (sum(x) for x in zip(*((100 - float(right), float(share)) for right, share in said[-3:]), strict=True))
    assert wrong < 0.6 * share, said  # to take all for the text's would be as often wrong as there are replaced ones
    theirs, info = transformers.BertModel.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    old = transformers.BertModel.from_pretrained(tmp_path / "bert").state_dict()
    same = {name for name, value in theirs.state_dict().items() if torch.equal(value, old[name])}
    assert {name for name in same if "position_ids" not in name} == {"pooler.dense.weight", "pooler.dense.bias"}


@pytest.mark.parametrize("masked", [(), (1,), (0, 3)])
def test_only_masked_tokens_are_drawn_anew(masked: tuple[int, ...]) -> None:
    """The rest is the text, where the input was another word too."""
    text, chosen = torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 4, dtype=torch.bool)
    chosen[0, list(masked)] = True
    batch = {"input_ids": text.masked_fill(chosen, 1), "labels": text.masked_fill(~chosen, -100)}

    class Sure:
        """Scores that leave a draw no choice: the id 9."""

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x), 10), -1e4).index_fill(1, torch.tensor([9]), 0.0)

    ids, wrong = example("replaced_tokens").replaced(Sure(), torch.randn(1, 4, 2), batch)
    assert torch.equal(ids, text.masked_fill(chosen, 9)) and torch.equal(wrong, chosen)
