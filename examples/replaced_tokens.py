"""Go on pretraining an encoder by finding replaced tokens (ELECTRA; Clark et al., 2020), before it is fine-tuned. No recipe does
this: it is a loop of one's own out of the library's parts, two models at once.

    python examples/replaced_tokens.py model=bert-base-uncased data.path=corpus.txt num_epochs=20 output_dir=runs/replaced

takes what `modelcenter train mlm` takes. A masked LM, trained as that recipe says, fills its own masks with words that it draws; a
second copy of the model learns which tokens are not the text's. That copy is written to output_dir/model as a bare encoder:

    modelcenter train glue/cola model=runs/replaced/model
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelcenter as mc
from modelcenter.data.prefetch import prefetch
from modelcenter.errors import InputError
from modelcenter.ops.cross_entropy import IGNORE
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.optim.schedules import lr_factor
from modelcenter.parallel.machine import Machine
from modelcenter.train.evaluate import on_device
from modelcenter.train.prepare import prepare
from modelcenter.train.read import load_recipe
from modelcenter.train.resolve import resolve
from modelcenter.train.step import autocast, update


class Detector(nn.Module):
    """A logit for each token: was it replaced? (b s)"""

    def __init__(self, encoder: mc.Model):
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(encoder.config.dim, 1, device=encoder.device)

    def forward(self, **batch: Any) -> Tensor:
        found: Tensor = self.out(self.encoder(**batch).last_hidden_state).squeeze(-1)
        return found


@torch.no_grad()
def replaced(head: Any, hidden: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The text with a draw from the masked LM where tokens were masked, and where it is another text now (both b s)."""
    labels, at = batch["labels"], batch["target_places"]
    text = torch.where(labels == IGNORE, batch["input_ids"], labels)
    logits = head.logits(hidden.flatten(0, 1)[at]).float()
    drawn = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)  # Gumbel's way to draw from a softmax
    ids = text.flatten().scatter(0, at, drawn).view_as(text)
    return ids, ids != text


def known(batch: dict[str, Any]) -> dict[str, Any]:
    """What a GPU would be waited for if it were asked there: which tokens were masked, and whether any are padding."""
    found = {**batch, "target_places": (batch["labels"] != IGNORE).flatten().nonzero().squeeze(1)}
    if "attention_mask" in found and found["attention_mask"].all():  # rows that are packed have none
        del found["attention_mask"]
    return found


def main(settings: list[str]) -> int:
    recipe, device = resolve(load_recipe("mlm", settings), Machine())
    setup = prepare(recipe, Machine(), device)
    print("\n".join(setup.lines))
    generator: Any = setup.model
    torch.manual_seed(recipe.seed)
    detector = Detector(mc.load(recipe.model, task="backbone", dtype="fp32", device=device))
    pair = [(model.train(), build_optimizer(model, recipe.optimizer)) for model in (generator, detector)]
    out = Path(recipe.output_dir) / "model"
    steps = prefetch(setup.loader.steps(micro_batch=recipe.batch))
    for step in range(1, setup.steps + 1):
        batch = on_device(known(next(steps)[1][0]), device)
        with autocast(recipe.precision, device):
            guess = generator(**batch, output_hidden_states=True)  # of all tokens: for the loss those with a label were enough
            ids, wrong = replaced(generator.head, guess.last_hidden_state, batch)
            text = {key: value for key, value in batch.items() if key not in ("labels", "target_places")}
            scores = detector(**text | {"input_ids": ids}).float()
            if "attention_mask" in batch:
                scores, wrong = (x[batch["attention_mask"].bool()] for x in (scores, wrong))
            found = F.binary_cross_entropy_with_logits(scores, wrong.float())
        (guess.loss + found).backward()  # the two share no weight
        rate = recipe.optimizer.lr * lr_factor(recipe.schedule, step - 1, setup.steps)
        for (model, optimizer), loss in zip(pair, (guess.loss, found), strict=True):
            update(model, optimizer, loss.detach(), rate, recipe.max_grad_norm)
        if step % recipe.logging_steps == 0 or step == setup.steps:
            right, share = ((scores > 0) == wrong).float().mean(), wrong.float().mean()
            said = f"masked {guess.loss:.3f} replaced {found:.3f}: {right:.1%} right, {share:.1%} replaced"
            print(f"step {step}/{setup.steps} {said}", flush=True)
        if step == setup.steps or (recipe.save_steps and step % recipe.save_steps == 0):
            detector.encoder.save_pretrained(out)
            setup.tokenizer.save(out)
    steps.close()
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        sys.exit()
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"error: {error}")
