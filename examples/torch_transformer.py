"""A small transformer that learns to write, character by character, in the ways of a long training run:

    horovodish run -np 2 python examples/torch_transformer.py --checkpoint transformer.pt

Mixed precision, gradients of several passes in one step, clipping, a learning rate that warms up, and checkpoints. Stop
it whenever you like: the same command goes on at the last checkpoint, with the numbers that it would have had without
the stop, and a larger --steps trains on from the end. Its text is the reference manual that every Python brings along
for help(), so there is nothing to download; --text FILE takes another one.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import horovodish.torch as hvd

CONTEXT = 64  # characters that the model sees
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 16  # blocks of text in a pass, on each rank
PASSES = 2  # in a step, on each rank
LEARNING_RATE = 3e-3  # of one rank; N ranks, whose batch is N times as large, take N times as much after the warm-up
WARMUP_STEPS = 40
REPORT_STEPS = 20
CHECKPOINT_STEPS = 100
DEVICE = "cpu"


class Transformer(nn.Module):
    """Says at each place of a text how likely each character is to come next."""

    def __init__(self, characters: int):
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        past_only = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.characters(text) + self.places.weight[:length]
        return self.output(self.layers(hidden, mask=past_only, is_causal=True))


def loss_of(model: nn.Module, blocks: Tensor, precision: torch.dtype) -> Tensor:
    """How surprising each character of the blocks is after those before it, in nats on average."""
    with torch.amp.autocast(DEVICE, precision, enabled=precision is not torch.float32):
        logits = model(blocks[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), blocks[:, 1:].flatten())


def blocks_of(file: Path | None) -> tuple[str, Tensor, Tensor]:
    """The characters of the text, and its blocks: those to train on and those to test with."""
    text = None
    if hvd.rank() == 0:
        text = file.read_text(encoding="utf-8") if file else "\n".join(topics.values())
    text = hvd.broadcast_object(text)  # only rank 0 needs the file
    needed = 2 * CONTEXT * BATCH * PASSES * hvd.size()
    if len(text) < needed:
        sys.exit(f"the text has {len(text)} characters, but {hvd.size()} ranks need {needed} to train")
    characters = "".join(sorted(set(text)))
    number = {character: index for index, character in enumerate(characters)}
    blocks = torch.tensor([number[character] for character in text]).unfold(0, CONTEXT + 1, CONTEXT)
    tested = len(blocks) // 10
    return characters, blocks[tested:], blocks[:tested]


def passes(loader: DataLoader[Tensor], sampler: hvd.ResumableSampler) -> Iterator[Tensor]:
    """This rank's batches, epoch after epoch; of each epoch as many whole steps as all ranks have batches for."""
    for epoch in itertools.count(sampler.state_dict()["epoch"]):
        sampler.set_epoch(epoch)
        steps = hvd.allreduce(torch.tensor(len(loader) // PASSES), op=hvd.Min).item()
        yield from itertools.islice(loader, steps * PASSES)


def save(checkpoint: Path, step: int, parts: dict[str, Any]) -> None:
    """Rank 0 writes the file: whoever reads it finds the old one or the new one, and never half of it."""
    if hvd.rank() == 0:
        unfinished = checkpoint.with_name(f"{checkpoint.name}.unfinished")
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, unfinished)
        unfinished.replace(checkpoint)


def load(checkpoint: Path, parts: dict[str, Any]) -> int:
    """Rank 0 reads the file, if there is one, and every rank gets what is in it. Gives the number of steps done."""
    state = None
    if hvd.rank() == 0 and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
    state = hvd.broadcast_object(state)
    if state is None:
        return 0
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]


@torch.no_grad()
def test(model: nn.Module, blocks: Tensor, precision: torch.dtype) -> float:
    """The loss on text that was not trained on. Every rank looks at its part."""
    model.eval()
    total = torch.zeros(2)
    for batch in blocks[hvd.rank() :: hvd.size()].split(BATCH):
        total += torch.tensor([loss_of(model, batch, precision) * len(batch), len(batch)])
    loss, count = hvd.allreduce(total, op=hvd.Sum, name="test")
    return (loss / count).item()


@torch.no_grad()
def written(model: nn.Module, characters: str, length: int = 400) -> str:
    """Some text by the model."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.zeros(1, 1, dtype=torch.int64)  # in most texts, a line begins behind the first character
    for _ in range(length):
        likely = functional.softmax(model(text[:, -CONTEXT:])[0, -1] / 0.7, dim=0)
        text = torch.cat([text, torch.multinomial(likely, 1, generator=generator)[None]], dim=1)
    return "".join(characters[number] for number in text[0])


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="how many to train in all, those before a stop included")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from and to write; none when not given")
    parser.add_argument("--text", type=Path, help="file to learn from")
    parser.add_argument("--precision", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    precision = getattr(torch, options.precision)

    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks may start with different weights: rank 0's are broadcast below
    characters, train_blocks, test_blocks = blocks_of(options.text)
    sampler = hvd.ResumableSampler(train_blocks)
    loader = DataLoader(train_blocks, BATCH, sampler=sampler, drop_last=True)

    model = Transformer(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=PASSES)
    scheduler = LinearLR(optimizer, start_factor=1 / hvd.size(), total_iters=WARMUP_STEPS)
    # Small gradients vanish in float16 unless the loss is scaled; the other dtypes have a range that needs no scale.
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision is torch.float16)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    first_step = load(options.checkpoint, parts) if options.checkpoint else 0
    say(f"{hvd.size()} ranks, {len(train_blocks)} blocks of {CONTEXT} characters, {first_step} steps done")

    losses = []
    batches = passes(loader, sampler)
    for step in range(first_step + 1, options.steps + 1):
        model.train()
        step_batches = [next(batches) for _ in range(PASSES)]
        torch.manual_seed(step * hvd.size() + hvd.rank())  # so that dropout does not depend on where training resumed
        for batch in step_batches:
            loss = loss_of(model, batch, precision) / PASSES
            scaler.scale(loss).backward()  # the last one ends with the gradients averaged over all ranks
            sampler.record(len(batch))
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if step % REPORT_STEPS == 0:
            mean = hvd.allreduce(torch.stack(losses).mean(), name="loss").item() * PASSES
            say(f"step {step:4}  loss {mean:.3f}  learning rate {scheduler.get_last_lr()[0]:.4f}")
            losses.clear()
        if options.checkpoint and (step % CHECKPOINT_STEPS == 0 or step == options.steps):
            save(options.checkpoint, step, parts)

    hvd.check_consistency(model, optimizer)  # all ranks hold the same bits
    say(f"loss on other text {test(model, test_blocks, precision):.3f} nats per character")
    say(written(model, characters))


if __name__ == "__main__":
    main()
