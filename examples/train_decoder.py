"""Train a small decoder on characters, with graphfuse's norms and with torch's, and compare the losses.

    python examples/train_decoder.py [--steps N] [--device cuda] [--plot losses.svg]

On a CPU it takes a minute or two; fewer steps are enough to see it run.
Both models are the same but for their norms. torch's is trained with several seeds, which says how far runs are
apart by chance; graphfuse's starts from the first seed, and may not be further from torch's of that seed than chance
moves them.
"""

import argparse
import itertools
import random
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from graphfuse import torch as graphfuse

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int


SIZES = {"cpu": Size(2, 64, 2, 48, 12, 100), "cuda": Size(6, 512, 8, 256, 32, 400)}
LAST_PLACE = 1e-7  # of a loss in float32
EVERY = 10  # steps between two looks at text that is not trained on


def text(sentences: int, seed: int) -> str:
    """Little stories of animals that fetch, count and trade things, so that there are words and sums to learn."""
    pick = random.Random(seed)
    animals = ["an otter", "a heron", "the old badger", "a young fox", "two mice", "the toad"]
    places = ["by the river", "under the hill", "at the mill", "behind the barn", "on the frozen pond"]
    things = ["acorns", "pebbles", "feathers", "chestnuts", "blue shells"]
    verbs = ["found", "counted", "hid", "carried home", "gave away", "traded"]
    found = []
    for _ in range(sentences):
        a, b = pick.randint(1, 9), pick.randint(1, 9)
        who, where, what = pick.choice(animals), pick.choice(places), pick.choice(things)
        sentence = f"{who} {pick.choice(verbs)} {a} {what} {where}"
        if pick.random() < 0.5:
            sentence += f", then {b} more, and had {a + b} {what}"
        found.append(sentence + ". ")
    return "".join(found)


class TorchAddRMSNorm(torch.nn.RMSNorm):
    """What graphfuse.torch.AddRMSNorm is, by torch's operations."""

    def forward(self, x, residual):
        total = x + residual
        return super().forward(total), total


@dataclass(frozen=True)
class Norms:
    """The modules that make the difference."""

    plain: type[torch.nn.Module]
    added: type[torch.nn.Module]


TORCH = Norms(torch.nn.RMSNorm, TorchAddRMSNorm)
GRAPHFUSE = Norms(graphfuse.RMSNorm, graphfuse.AddRMSNorm)


class Attention(torch.nn.Module):
    def __init__(self, size: Size, norms: Norms):
        super().__init__()
        self.heads = size.heads
        self.qkv = torch.nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = torch.nn.Linear(size.width, size.width, bias=False)
        self.q_norm, self.k_norm = (norms.plain(size.width // size.heads) for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # slices of one tensor
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        q, k = q.to(v.dtype), k.to(v.dtype)  # torch's norm makes float32 of them under autocast
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class SwiGLU(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Decoder(torch.nn.Module):
    """Each branch's result goes into the next norm beside the residual, which the norm adds it to."""

    def __init__(self, size: Size, norms: Norms, characters: int):
        super().__init__()
        self.embedding = torch.nn.Embedding(characters, size.width)
        self.position = torch.nn.Embedding(size.context, size.width)
        self.branches = torch.nn.ModuleList(
            branch for _ in range(size.layers) for branch in (Attention(size, norms), SwiGLU(size.width))
        )
        self.first = norms.plain(size.width)
        self.norms = torch.nn.ModuleList(norms.added(size.width) for _ in self.branches)
        self.head = torch.nn.Linear(size.width, characters, bias=False)

    def forward(self, tokens):
        total = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        y = self.first(total)
        for branch, norm in zip(self.branches, self.norms, strict=True):
            y, total = norm(branch(y), total)
        return self.head(y)


def train(norms: Norms, seed: int, size: Size, device: str, steps: int) -> list[float]:
    """Losses on held-out text, every so many steps."""
    train_text, held_out = text(2000, 0), text(60, 1)
    characters = sorted(set(train_text + held_out))
    codes = {c: i for i, c in enumerate(characters)}
    data, other = (torch.tensor([codes[c] for c in t], device=device) for t in (train_text, held_out))
    torch.manual_seed(seed)
    model = Decoder(size, norms, len(characters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if device == "cpu" else 6e-4, weight_decay=0.01)
    order = torch.Generator().manual_seed(seed)
    span = torch.arange(size.context + 1, device=device)
    views = other[: other.numel() // (size.context + 1) * (size.context + 1)].view(-1, size.context + 1)

    def loss(rows):
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            guesses = model(rows[:, :-1])
        return F.cross_entropy(guesses.float().flatten(0, 1), rows[:, 1:].flatten())

    found = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                found.append(loss(views).item())
        starts = torch.randint(len(data) - size.context, (size.batch, 1), generator=order).to(device)
        optimizer.zero_grad()
        loss(data[starts + span]).backward()
        optimizer.step()
    return found


def apart(a: list[float], b: list[float]) -> float:
    """How far two runs are apart: the mean over their looks."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def plot(path: str, ours: list[float], torchs: list[list[float]]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "graphfuse"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    steps = [EVERY * n for n in range(len(ours))]
    styles = [{"color": "0.55", "ls": (0, (n + 2, 1)), "label": f"torch, seed {seed}"} for n, seed in enumerate(SEEDS)]
    styles.append({"color": "tab:green", "lw": 2, "alpha": 0.7, "label": f"graphfuse, seed {SEEDS[0]}"})
    for losses, style in zip((*torchs, ours), styles, strict=True):
        left.plot(steps, losses, **style)
        if losses is not torchs[0]:
            right.semilogy(
                steps, [max(abs(a - b), LAST_PLACE) for a, b in zip(losses, torchs[0], strict=True)], **style
            )
    left.set(xlabel="step", ylabel="loss on held-out text", ylim=(0, None))
    right.set(xlabel="step", ylabel=f"difference from torch, seed {SEEDS[0]}")
    left.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, help=f"of each run, {EVERY} or more")
    parser.add_argument("--plot", help="where to draw the losses (matplotlib)")
    given = parser.parse_args()
    size = SIZES[given.device]
    if given.steps is not None and given.steps < EVERY:
        parser.error(f"--steps is {given.steps}; accepted: {EVERY} or more")
    steps = given.steps or size.steps
    print(f"{size.layers} layers of {size.width} on {given.device}, {steps} steps of {size.batch} x {size.context}")
    torchs = [train(TORCH, seed, size, given.device, steps) for seed in SEEDS]
    ours = train(GRAPHFUSE, SEEDS[0], size, given.device, steps)
    for name, losses in (*((f"torch, seed {s}", t) for s, t in zip(SEEDS, torchs, strict=True)), ("graphfuse", ours)):
        print(f"{name:14} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    pairs = [apart(a, b) for a, b in itertools.combinations(torchs, 2)]
    difference, spread = apart(ours, torchs[0]), sum(pairs) / len(pairs)
    print(f"graphfuse and torch of one seed are {difference:.2g} apart")
    print(f"two seeds of torch are {spread:.2g} apart on average, {max(pairs):.2g} at most")
    if given.plot:
        plot(given.plot, ours, torchs)
    if not ours[-1] < 0.7 * ours[0]:
        raise SystemExit("nothing was learned")
    # In float32 they are far closer than two seeds: a gradient that is a little wrong may still learn like one. In
    # bfloat16, roundings part them as seeds do.
    if not difference < (spread / 10 if given.device == "cpu" else max(pairs)):
        raise SystemExit("the two loss curves do not agree")
    print("the loss curves of graphfuse and torch agree")


if __name__ == "__main__":
    main()
