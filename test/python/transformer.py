"""A small transformer that learns to predict the next letter of Python's own documentation."""
import torch
from torch import nn

LENGTH, WIDTH, LETTERS = 64, 64, 128


def text():
    """Letters of the language reference that comes with Python, as numbers."""
    from pydoc_data.topics import topics
    return torch.tensor([min(ord(letter), LETTERS - 1)
                         for name in sorted(topics)[:20] for letter in topics[name]])


class Transformer(nn.Module):
    def __init__(self, width=WIDTH, layers=2):
        super().__init__()
        self.letter = nn.Embedding(LETTERS, width)
        self.place = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers))
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters):
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1])
        x = self.letter(letters) + self.place(torch.arange(letters.shape[1]))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def made(**options):
    torch.manual_seed(1)
    return Transformer(**options)


def batches(rank, size, steps, each=4):
    """Every rank gets its own part of what one process would see."""
    letters = text()
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        starts = torch.randint(len(letters) - LENGTH - 1, (each * size,), generator=generator)
        rows = torch.stack([letters[start:start + LENGTH + 1] for start in starts[rank::size]])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
