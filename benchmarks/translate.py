"""BLEU of a trained sequence-to-sequence folder on a file of pairs, greedy decoding.

    python benchmarks/translate.py runs/seq2seq/model pairs.jsonl [--device cuda]
"""

import argparse
import json

import torch

import modelcenter as mc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("pairs", help='jsonl rows {"source": ..., "target": ...}')
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    args = parser.parse_args()
    import sacrebleu

    model = mc.load(args.model, device=args.device)
    tokenizer = mc.load_tokenizer(args.model)
    with open(args.pairs, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    found = []
    for start in range(0, len(rows), args.batch):
        ids = [tokenizer.encode(row["source"]) for row in rows[start : start + args.batch]]
        width = max(map(len, ids))
        batch = torch.tensor([i + [tokenizer.pad_id] * (width - len(i)) for i in ids], device=args.device)
        mask = torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i in ids], device=args.device)
        out = model.generate(batch, mask, max_new_tokens=args.max_new_tokens)
        for row in out.tolist():
            row = row[1:]
            row = row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row
            found.append(tokenizer.decode(row).strip())
    bleu = sacrebleu.corpus_bleu(found, [[row["target"] for row in rows]])
    for row, text in list(zip(rows, found, strict=True))[:3]:
        print(f"{row['source']}\n  wanted: {row['target']}\n  found:  {text}")
    print(f"BLEU {bleu.score:.2f} on {len(rows)} pairs; {bleu.get_signature() if hasattr(bleu, 'get_signature') else 'sacrebleu'}")


if __name__ == "__main__":
    main()
