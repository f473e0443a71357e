"""Speech recognition: a recurrent network with CTC on utterances of different lengths, in length buckets."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from runner import Task

SETTINGS = {
    "updates": 5,
    "global_batch_size": 6,
    "optimizer.lr": 0.005,
    "scheduler": "one_cycle",
    "max_grad_norm": 5.0,
    "sampler": "length_buckets",
    "sampler.bucket": 4,
}


def build(*, hidden: int = 8) -> Task:
    return Speech(Recognizer(hidden))


class Recognizer(nn.Module):
    def __init__(self, hidden, features=4, symbols=6):
        super().__init__()
        self.gru = nn.GRU(features, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, symbols)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=frames.shape[1])
        return F.log_softmax(self.head(outputs), dim=2)


class Utterances(torch.utils.data.Dataset):
    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(8, 24, (number,), generator=generator).tolist()
        self.frames = [torch.randn(length, 4, generator=generator) for length in self.lengths]
        self.texts = [torch.randint(1, 6, (length // 4,), generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.frames[index], self.texts[index]


class Speech(Task):
    item = "utterance"

    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        return Utterances(18, 0) if split == "train" else Utterances(6, 1)

    def sample_lengths(self, dataset):
        return dataset.lengths

    def collate(self, samples):
        frames, texts = zip(*samples, strict=True)
        lengths, sizes = (torch.tensor([len(each) for each in several]) for several in (frames, texts))
        return pad_sequence(frames, batch_first=True), lengths, pad_sequence(texts, batch_first=True), sizes

    def loss(self, model, batch):
        frames, lengths, texts, sizes = batch
        scores = model(frames, lengths).transpose(0, 1)
        return F.ctc_loss(scores, texts, lengths, sizes, reduction="sum", zero_infinity=True), len(lengths)
