"""A transformer encoder with LoRA adapters for several tasks, a head for each, and a router that mixes the adapters.

The parts that a phase can train: base, lm_head, adapters, heads, router.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.noise import SampleNoise, per_sample_noise

from .data import GENERATION, Batch
from .text import TASKS
from .tokenizer import BEGIN, PAD

Routing = Literal["base", "true", "router", "mixed", "uniform"]
TARGETS = ("q", "k", "v", "o")  # the projections that have adapters
NUM_LOOKS = 4  # number of weighted means that the router computes


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `width` is that of the residual stream, lengths are in tokens.

    rank       rank of each adapter; its output is scaled by alpha / rank with alpha = 2 x rank
    router     widths of the two hidden layers of the router
    """

    num_layers: int
    num_heads: int
    width: int
    rank: int
    router: tuple[int, int]
    decoder_layers: int
    max_length: int
    max_target_length: int
    vocab_size: int
    num_labels: int


class Dynamo(nn.Module):
    """Map tokens to the outputs of five tasks, see `forward`.

    dropout  dropout probability of the adapter inputs
    hard     the router selects one adapter (Gumbel-softmax, straight-through, in training) instead of mixing all
    """

    def __init__(self, shape: Shape, *, dropout: float = 0.1, hard: bool = True) -> None:
        super().__init__()
        self.shape, self.hard = shape, hard
        self.base = Encoder(shape, dropout)
        self.lm_head = MaskedHead(shape)
        self.adapters = nn.ModuleList(
            nn.ModuleDict({target: LoRA(len(TASKS), shape.width, shape.rank) for target in TARGETS})
            for _ in range(shape.num_layers)
        )
        self.heads = nn.ModuleDict(
            {
                "classification": Classifier(shape),
                "qa": Spans(shape),
                **{task: Decoder(shape) for task in GENERATION},
            }
        )
        self.router = Router(shape)

    def forward(
        self,
        batch: Batch,
        routing: Routing,
        *,
        teacher: float = 0.0,
        head: str | None = None,
        generate: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Return the output of each head by task, and the output of the router.

        batch     as in Rounds, or in MaskedTexts for routing "base"; only `source` if only the router is needed
        routing   base: no adapters, "mlm_logits" (N, M, V) of the masked tokens; true: the adapter of a record's task;
                  router: selected by the router; mixed: true for a fraction `teacher` of the records, else router;
                  uniform: all adapters with equal weights
        head      run only this head, on all records and without answers; a decoder then generates (N, S) tokens
        generate  tasks whose decoders also generate, for their own records: (n, S) tokens, named "generated.<task>"
        Returns router (N, E), logits over tasks, and temperature, a scalar, if the routing uses them;
        classification (n, L), logits; qa (n, 2, T), logits of first and last token; summary, code, translation
        (n, S, V), log-probabilities.
        """
        source = batch["source"]
        real = source != PAD
        if routing == "base":
            return {"mlm_logits": self.lm_head(self.base(source, real), batch["places"], self.base.embedding.weight)}
        made: dict[str, Tensor] = {}
        if routing in ("router", "mixed"):
            made["router"] = self.router(self._identified(self.base(source, real), source), real)
            made["temperature"] = self.router.temperature
        if "task" not in batch:
            return made
        noise = record_noise(batch) if self.training or routing == "mixed" else None
        weights = self.routing_weights(batch["task"], routing, teacher, made, noise)
        states = self.base(source, real, self.adapters, weights, noise if self.training else None)
        if head is not None:
            made[head] = self._head(head, states, source, real, None)
            return made
        counts = [len(batch[task]) for task in TASKS]
        parts = zip(TASKS, *(torch.split(x, counts) for x in (states, source, real)), strict=True)
        for task, own, tokens, mask in parts:
            if len(own):
                made[task] = self._head(task, own, tokens, mask, batch[task])
                if task in generate:
                    made[f"generated.{task}"] = self._head(task, own, tokens, mask, None)
        return made

    def routing_weights(
        self,
        task: Tensor,
        routing: Routing,
        teacher: float,
        made: Mapping[str, Tensor],
        noise: SampleNoise | None = None,
    ) -> Tensor:
        """Return the weights (N, E) of the adapters for each record.

        noise  random numbers of the N records, for training and for routing "mixed"
        """
        true = F.one_hot(task, len(TASKS)).float()
        if routing == "true":
            return true
        if routing == "uniform":
            return torch.full_like(true, 1 / len(TASKS))
        logits = made["router"]
        if not self.hard:
            routed = logits.softmax(dim=-1)
        elif self.training:
            assert noise is not None
            routed = gumbel_softmax(logits, noise.named("gumbel"))
        else:
            routed = F.one_hot(logits.argmax(dim=-1), len(TASKS)).float()
        if routing == "router":
            return routed
        assert noise is not None
        return torch.where(noise.named("teacher").bernoulli(teacher, 1), true, routed)

    def _head(self, task: str, states: Tensor, source: Tensor, real: Tensor, answer: Tensor | None) -> Tensor:
        head = self.heads[task]
        if isinstance(head, Spans):
            states = self._identified(states, source)
        if not isinstance(head, Decoder):
            result: Tensor = head(states, real)
            return result
        memory = Memory(states, source, real, self.base.embedding.weight)
        if answer is None:
            return head.generate(memory)
        # The input of the decoder: BEGIN and the answer shifted by one. Tokens after END are masked.
        before = F.pad(answer[:, :-1].clamp_min(PAD), (1, 0), value=BEGIN)
        log_probabilities: Tensor = head(before, memory)
        return log_probabilities

    def _identified(self, states: Tensor, source: Tensor) -> Tensor:
        """Return the states concatenated with the embeddings of their tokens (N, T, 2 C).

        An encoder trained on masked tokens encodes the likely token of a position rather than the actual one.
        """
        embeddings = self.base.embedding(source)
        return torch.cat([states, F.layer_norm(embeddings, embeddings.shape[-1:]).to(states.dtype)], dim=-1)


class Encoder(nn.Module):
    """Map tokens (N, T) to states (N, T, C): pre-norm blocks, rotary positions; padding is masked."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.head_width = shape.width // shape.num_heads
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_init_weights)
        for name, weight in self.named_parameters():
            if name.endswith((".o.weight", ".output.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.num_layers))

    def forward(
        self,
        source: Tensor,
        real: Tensor,
        adapters: Sequence[nn.ModuleDict] | nn.ModuleList | None = None,
        weights: Tensor | None = None,
        noise: SampleNoise | None = None,
    ) -> Tensor:
        """Return the states; `adapters`, one mapping per block, are applied with `weights` (N, E).

        noise  random numbers for dropout in the N rows; None: no dropout
        """
        x = self.embedding(source)
        turn = rotation(source.shape[1], self.head_width, source.device)
        mask = real[:, None, None, :]
        for i, block in enumerate(self.blocks):
            own = None if noise is None else noise.named(i)
            x = block(x, turn, mask, None if adapters is None else adapters[i], weights, own)
        normed: Tensor = self.norm(x)
        return normed


class Block(nn.Module):
    """Self-attention and a feed-forward network of four times the width, each added to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, dropout
        self.attention_norm = nn.LayerNorm(shape.width)
        # No bias for keys: it would add the same to all scores of a query.
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=name != "k") for name in TARGETS)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = FeedForward(shape.width)

    def forward(
        self,
        x: Tensor,
        turn: Tensor,
        mask: Tensor,
        adapters: Mapping[str, nn.Module] | nn.Module | None,
        weights: Tensor | None,
        noise: SampleNoise | None = None,
    ) -> Tensor:
        def projected(targets: str, inputs: Tensor) -> list[Tensor]:
            results: list[Tensor] = [getattr(self, target)(inputs) for target in targets]
            if adapters is None:
                return results
            dropped = inputs if noise is None else noise.named(targets).dropout(inputs, self.dropout)
            pairs = zip(results, targets, strict=True)
            return [result + adapters[target](dropped, weights) for result, target in pairs]  # type: ignore[index]

        B, T, C = x.shape
        projections = projected("qkv", self.attention_norm(x))
        q, k, v = (projection.view(B, T, self.num_heads, -1).transpose(1, 2) for projection in projections)
        y = F.scaled_dot_product_attention(apply_rotation(q, turn), apply_rotation(k, turn), v, mask)
        x = x + projected("o", y.transpose(1, 2).reshape(B, T, C))[0]
        transformed: Tensor = self.mlp(self.mlp_norm(x))
        return x + transformed


class LoRA(nn.Module):
    """Low-rank updates of a projection for E tasks, weighted for each record.

    delta = 2 * sum over e of w[e] B[e] A[e] x, since alpha is 2 * rank; B is initialized with zeros, so delta is 0.
    All A are applied in one matrix product, and so are all B: a batch may mix tasks, and weights may be soft.
    Source: Hu et al., LoRA, ICLR 2022, section 4.1.
    """

    def __init__(self, num_tasks: int, width: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(num_tasks, rank, width))
        self.B = nn.Parameter(torch.zeros(num_tasks, width, rank))
        self.scale = 2.0
        for matrix in self.A:
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))  # as nn.Linear

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the update of the projection of x (N, T, C), for weights (N, E)."""
        tasks, rank, width = self.A.shape
        inner = F.linear(x, self.A.reshape(tasks * rank, width))
        inner = inner * (self.scale * weights).to(inner.dtype).repeat_interleave(rank, dim=1)[:, None, :]
        return F.linear(inner, self.B.transpose(0, 1).reshape(width, tasks * rank))


class Router(nn.Module):
    """Map states from `_identified` (N, T, 2 C) to logits over tasks (N, E), divided by a learned temperature.

    The temperature is at least 0.1. Often a single word identifies the task, and a plain mean over the text would
    dilute it, so the router computes several weighted means.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, narrow = shape.router
        self.looks = nn.Linear(2 * shape.width, NUM_LOOKS, bias=False)
        self.layers = nn.Sequential(
            nn.LayerNorm(NUM_LOOKS * 2 * shape.width),
            nn.Linear(NUM_LOOKS * 2 * shape.width, wide),
            nn.GELU(),
            nn.Linear(wide, narrow),
            nn.GELU(),
            nn.Linear(narrow, len(TASKS)),
        )
        self.raw_temperature = nn.Parameter(torch.tensor(math.log(math.expm1(0.9))))  # a temperature of 1
        nn.init.normal_(self.looks.weight, std=0.02)

    @property
    def temperature(self) -> Tensor:
        """The temperature, a scalar with a gradient."""
        return 0.1 + F.softplus(self.raw_temperature)

    def forward(self, states: Tensor, real: Tensor) -> Tensor:
        shares = self.looks(states).float().masked_fill(~real[:, :, None], float("-inf")).softmax(dim=1)
        means = torch.einsum("nth,ntc->nhc", shares.to(states.dtype), states).flatten(1)
        logits: Tensor = self.layers(means)
        return logits.float() / self.temperature


class MaskedHead(nn.Module):
    """Map states to logits of the tokens at `places`, with the embedding as the output projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(shape.width, shape.width), nn.GELU(), nn.LayerNorm(shape.width))
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))
        self.apply(_init_weights)

    def forward(self, states: Tensor, places: Tensor, embedding: Tensor) -> Tensor:
        chosen = states.gather(1, places[:, :, None].expand(-1, -1, states.shape[-1]))
        return F.linear(self.transform(chosen), embedding, self.bias)


class Classifier(nn.Module):
    """Map states (N, T, C) to logits of the labels (N, L), from their mean over the text."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape.width, shape.width),
            nn.GELU(),
            nn.Linear(shape.width, shape.num_labels),
        )

    def forward(self, states: Tensor, real: Tensor) -> Tensor:
        logits: Tensor = self.layers(mean_pool(states, real))
        return logits


class Spans(nn.Module):
    """Map states from `_identified` (N, T, 2 C) to logits (N, 2, T) of the first and last token of an answer.

    The query is a weighted mean over the text; it is compared with each token and its six neighbors. Padding is masked.
    Source: Chen et al., Reading Wikipedia to Answer Open-Domain Questions, ACL 2017, section 3.2.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.asked = nn.Linear(2 * shape.width, 1, bias=False)
        self.query = nn.Linear(2 * shape.width, 2 * shape.width)
        self.keys = nn.Conv1d(2 * shape.width, 2 * shape.width, kernel_size=7, padding=3, bias=False)

    def forward(self, states: Tensor, real: Tensor) -> Tensor:
        B, T, double = states.shape
        share = self.asked(states)[:, :, 0].float().masked_fill(~real, float("-inf")).softmax(dim=-1)
        query = self.query(torch.einsum("nt,ntc->nc", share.to(states.dtype), states)).view(B, 2, 1, double // 2)
        keys = self.keys((states * real[:, :, None]).transpose(1, 2)).view(B, 2, double // 2, T)
        logits: Tensor = (query @ keys)[:, :, 0].float() / math.sqrt(double // 2)
        return logits.masked_fill(~real[:, None], float("-inf"))


@dataclass(frozen=True)
class Memory:
    """The input of a decoder: states (N, T, C), tokens (N, T), mask of real tokens (N, T), and the embedding."""

    states: Tensor
    source: Tensor
    real: Tensor
    embedding: Tensor


class Decoder(nn.Module):
    """Generates tokens autoregressively, each from the vocabulary or copied from the source.

    Source: See et al., Get To The Point, ACL 2017, section 2.2 (the pointer-generator); blocks as in the encoder, with
    attention to its states.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.length = shape.max_target_length
        self.positions = nn.Embedding(shape.max_target_length, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.decoder_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.transform = nn.Linear(shape.width, shape.width)
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))
        self.pointer = nn.Linear(shape.width, shape.width)
        # A source token is matched by its state and by the token before it, which has just been generated if copying
        # continues. A bias would add the same to all scores.
        self.pointed = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, 1)
        self.apply(_init_weights)

    def forward(self, before: Tensor, memory: Memory) -> Tensor:
        """Return log-probabilities (N, S, V) of the token after each of `before` (N, S), which starts with BEGIN."""
        x = F.embedding(before, memory.embedding) + self.positions.weight[: before.shape[1]]
        for block in self.blocks:
            x = block(x, memory.states, memory.real[:, None, None, :])
        x = self.norm(x)
        words = F.linear(self.transform(x), memory.embedding, self.bias).float().softmax(dim=-1)
        previous = F.embedding(F.pad(memory.source[:, :-1], (1, 0), value=BEGIN), memory.embedding)
        found_by = self.pointed(torch.cat([memory.states, previous], dim=-1))
        scores = self.pointer(x) @ found_by.transpose(1, 2) / math.sqrt(x.shape[-1])
        attention = scores.float().masked_fill(~memory.real[:, None], float("-inf")).softmax(dim=-1)
        own = self.gate(x).float().sigmoid()
        copies = memory.source[:, None].expand(-1, x.shape[1], -1)
        probabilities: Tensor = (own * words).scatter_add(2, copies, (1 - own) * attention)
        return probabilities.clamp_min(1e-9).log()

    def generate(self, memory: Memory) -> Tensor:
        """Generate tokens (N, S) greedily; those after END are arbitrary."""
        generated = torch.full((len(memory.source), 1), BEGIN, device=memory.source.device)
        for _ in range(self.length):
            generated = torch.cat([generated, self(generated, memory)[:, -1:].argmax(dim=-1)], dim=1)
        return generated[:, 1:]


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's states and a feed-forward network, each with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(3))
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.o = nn.Linear(shape.width, shape.width)
        self.cross_q = nn.Linear(shape.width, shape.width)
        self.cross_kv = nn.Linear(shape.width, 2 * shape.width)
        self.cross_o = nn.Linear(shape.width, shape.width)
        self.mlp = FeedForward(shape.width)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = self.qkv(normed).chunk(3, dim=-1)
        x = x + self.o(self._attend(q, k, v, None))
        normed = self.norms[1](x)
        k, v = self.cross_kv(states).chunk(2, dim=-1)
        x = x + self.cross_o(self._attend(self.cross_q(normed), k, v, mask))
        transformed: Tensor = self.mlp(self.norms[2](x))
        return x + transformed

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return y.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """Two projections with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        transformed: Tensor = self.output(F.gelu(self.input(x), approximate="tanh"))
        return transformed


def record_noise(batch: Batch) -> SampleNoise:
    """Return the random numbers of the N records of a training batch, whose samples are rounds of all tasks."""
    task = batch["task"]
    round_of = torch.arange(len(task), device=task.device) % max(1, len(task) // len(TASKS))
    return per_sample_noise(batch).rows(round_of, task)


def gumbel_softmax(logits: Tensor, noise: SampleNoise) -> Tensor:
    """Sample a one-hot choice for each row of logits (N, E), with the gradient of their softmax.

    Like F.gumbel_softmax with hard=True, but with random numbers per record instead of the device's generator.
    Source: Jang et al., Categorical Reparameterization with Gumbel-Softmax, ICLR 2017, section 2.2.
    """
    uniform = noise.uniform(logits.shape[-1], dtype=logits.dtype).clamp_min(torch.finfo(logits.dtype).tiny)
    soft = (logits - (-uniform.log()).log()).softmax(dim=-1)
    chosen = F.one_hot(soft.argmax(dim=-1), logits.shape[-1]).to(soft.dtype)
    return chosen - soft.detach() + soft


def rotation(length: int, width: int, device: torch.device) -> Tensor:
    """Return cosine and sine (T, D / 2) of the rotation angles of the pairs of a head of width D at each position.

    Source: Su et al., RoFormer, 2021, section 3.2.2.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def apply_rotation(x: Tensor, turn: Tensor) -> Tensor:
    """Return x (N, H, T, D) with its pairs rotated, so that dot products depend on relative positions."""
    cosine, sine = turn.to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=-1)


def mean_pool(states: Tensor, real: Tensor) -> Tensor:
    """Return the mean (N, C) of the states (N, T, C) that are `real` (N, T)."""
    share = real / real.sum(dim=1, keepdim=True)
    return torch.einsum("ntc,nt->nc", states, share.to(states.dtype))


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
