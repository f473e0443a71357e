"""The plain PyTorch loop of each project, in which an update is one batch with a mean loss.

Each function trains `loop.model` on the batches of `loop`, and returns metrics that the run must report, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runner import per_sample_noise

Metrics = Mapping[str, float]


@dataclass
class Loop:
    """The inputs of a plain loop.

    batches () -> one batch per update, with the same samples as the run
    held     () -> validation data in one batch
    """

    task: Any
    model: Any
    updates: int
    batches: Callable[[], Iterator[Any]]
    held: Callable[[], Any]


def minimize(
    loop: Loop, loss_of: Callable[[Any], Tensor], optimizer: Any, schedule: Any = None, clip: float = 0
) -> None:
    """Take one optimizer step per batch."""
    for batch in loop.batches():
        optimizer.zero_grad()
        loss_of(batch).backward()
        if clip:
            nn.utils.clip_grad_norm_([each for each in loop.model.parameters() if each.grad is not None], clip)
        optimizer.step()
        if schedule:
            schedule.step()


def decaying(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, and other parameters without."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]


def warmed(optimizer: Any, curve: Callable[[int], float], warmup: int = 0) -> LambdaLR:
    return LambdaLR(optimizer, lambda update: curve(update) * min(1.0, (update + 1) / max(1, warmup)))


def wave(updates: int, warmup: int = 0, low: float = 0.1) -> Callable[[int], float]:
    def factor(update: int) -> float:
        done = max(0, update - warmup) / max(1, updates - warmup)
        return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2

    return factor


def line(updates: int, warmup: int) -> Callable[[int], float]:
    return lambda update: 1 - max(0, update - warmup) / (updates - warmup)


def language_model(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def nano_gpt(loop: Loop) -> Metrics:
    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.01, betas=(0.9, 0.99))
    schedule = warmed(optimizer, wave(loop.updates, 2), 2)
    minimize(loop, language_model(loop.model), optimizer, schedule, 1.0)
    return {"val/loss": language_model(loop.model.eval())(loop.held()).item()}


def hf_gpt2(loop: Loop) -> Metrics:
    def loss_of(tokens: Tensor) -> Tensor:
        labels = tokens.masked_fill(tokens == 0, -100)
        result: Tensor = loop.model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels).loss
        return result

    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.002, betas=(0.9, 0.95))
    minimize(loop, loss_of, optimizer, LambdaLR(optimizer, line(loop.updates, 0)), 1.0)
    return {"val/loss": loss_of(loop.held()).item()}


def hf_bert(loop: Loop) -> Metrics:
    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.002, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, line(loop.updates, 0))
    minimize(loop, lambda batch: loop.model(**batch).loss, optimizer, schedule, 1.0)
    held = loop.held()
    result = loop.model.eval()(**held)
    right = (result.logits.argmax(1) == held["labels"]).double().mean()
    return {"val/loss": result.loss.item(), "val/metrics.accuracy": right.item()}


def vit_mixup(loop: Loop) -> Metrics:
    optimizer = torch.optim.AdamW(decaying(loop.model, 0.05), lr=0.003, betas=(0.9, 0.95))
    schedule = warmed(optimizer, wave(loop.updates, 1), 1)
    minimize(loop, lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), optimizer, schedule, 1.0)
    images, labels = loop.held()
    return {"val/loss": F.cross_entropy(loop.model.eval()(images), labels).item()}


def resnet_augmented(loop: Loop) -> Metrics:
    optimizer = torch.optim.SGD(decaying(loop.model, 0.0005), lr=0.05, momentum=0.9, nesterov=True)
    schedule = warmed(optimizer, wave(loop.updates, 1), 1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    minimize(loop, lambda batch: criterion(loop.model(batch[0]), batch[1]), optimizer, schedule)
    images, labels = loop.held()
    return {"val/accuracy": (loop.model.eval()(images).argmax(1) == labels).double().mean().item()}


def timm_resnet(loop: Loop) -> Metrics:
    return resnet_augmented(loop)


def unet_diffusion(loop: Loop) -> Metrics:
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.002)
    averaged = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for images in loop.batches():
        noise = per_sample_noise(images)
        angle, drawn = noise.uniform() * torch.pi / 2, noise.normal(1, 8, 8)
        noisy = angle.cos().view(-1, 1, 1, 1) * images + angle.sin().view(-1, 1, 1, 1) * drawn
        optimizer.zero_grad()
        F.mse_loss(loop.model(noisy, angle * 2 / torch.pi), drawn).backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(loop.model)
    total, count = loop.task.loss(averaged, loop.held())
    return {"val/loss": total.item() / count}


def vae(loop: Loop) -> Metrics:
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.01)

    def terms(x: Tensor) -> tuple[Tensor, Tensor]:
        logits, mean, log_variance = loop.model(x, per_sample_noise(x))
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean()
        return F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean(), divergence

    def loss_of(x: Tensor) -> Tensor:
        reconstruction, divergence = terms(x)
        return reconstruction + 0.5 * divergence

    minimize(loop, loss_of, optimizer, clip=1.0)
    reconstruction, divergence = terms(loop.held())
    return {"val/reconstruction": reconstruction.item(), "val/divergence": divergence.item()}


def dcgan(loop: Loop) -> Metrics:
    generator, discriminator = loop.model.generator, loop.model.discriminator
    of_generator, of_discriminator = (
        torch.optim.Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999)) for each in (generator, discriminator)
    )
    for real in loop.batches():
        drawn = per_sample_noise(real).normal(6, 1, 1)
        of_discriminator.zero_grad()
        fooled = F.softplus(discriminator(generator(drawn).detach())).mean()
        (F.softplus(-discriminator(real)).mean() + fooled).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-discriminator(generator(drawn))).mean().backward()
        of_generator.step()
    return {}


def clip(loop: Loop) -> Metrics:
    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.005, betas=(0.9, 0.95))

    def loss_of(batch: Any) -> Tensor:
        images, texts = loop.model(*batch)
        logits = loop.model.log_scale.exp() * images @ texts.T
        pairs = torch.arange(len(images))
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2

    minimize(loop, loss_of, optimizer, warmed(optimizer, wave(loop.updates, 1), 1), 1.0)
    return {"val/loss": loss_of(loop.held()).item()}


def simclr(loop: Loop) -> Metrics:
    optimizer = torch.optim.SGD(decaying(loop.model, 1e-4), lr=0.05, momentum=0.9)

    def loss_of(batch: Any) -> Tensor:
        codes = F.normalize(loop.model(torch.cat(list(batch))), dim=1)
        logits = (codes @ codes.T / 0.5).masked_fill(torch.eye(len(codes), dtype=torch.bool), float("-inf"))
        half = len(codes) // 2
        return F.cross_entropy(logits, torch.cat([torch.arange(half) + half, torch.arange(half)]))

    minimize(loop, loss_of, optimizer, warmed(optimizer, wave(loop.updates, 1, 0.0), 1), 1.0)
    return {}


def moco(loop: Loop) -> Metrics:
    model = loop.model
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1, momentum=0.9)

    def loss_of(batch: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            keys = F.normalize(model.keys(batch[1]), dim=1)
        codes = F.normalize(model.encoder(batch[0]), dim=1)
        logits = torch.cat([(codes * keys).sum(1, keepdim=True), codes @ model.queue.T], dim=1)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(codes), dtype=torch.long)), keys

    for update, batch in enumerate(loop.batches()):
        loss, keys = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for key, weight in zip(model.keys.parameters(), model.encoder.parameters(), strict=True):
                key.mul_(0.9).add_(weight, alpha=0.1)
            first = 8 * update % len(model.queue)
            model.queue[first : first + 8] = keys
            model.next.fill_((first + 8) % len(model.queue))
    return {"val/loss": loss_of(loop.held())[0].item()}


def triplets(loop: Loop) -> Metrics:
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, round(0.3 * loop.updates), 0.1)

    def loss_of(batch: Any) -> Tensor:
        codes, labels = loop.model(batch[0]), batch[1]
        result = []
        for code, label in zip(codes, labels, strict=True):
            distances = ((code - codes).square().sum(1) + 1e-12).sqrt()
            result.append((distances[labels == label].max() - distances[labels != label].min() + 0.3).clamp(min=0))
        return torch.stack(result).mean()

    minimize(loop, loss_of, optimizer, schedule, 1.0)
    return {"val/loss": loss_of(loop.held()).item()}


def actor_critic(loop: Loop) -> Metrics:
    actor, critic = loop.model["actor"], loop.model["critic"]
    of_actor = torch.optim.Adam(actor.parameters(), lr=0.005)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    for update, start in enumerate(loop.batches()):
        states, actions, returns = loop.task.episode(loop.model, start)
        of_critic.zero_grad()
        F.mse_loss(critic(states).squeeze(2), returns).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        of_critic.step()
        if update % 2 == 0:
            of_actor.zero_grad()
            advantage = (returns - critic(states).squeeze(2)).detach()
            chosen = torch.distributions.Categorical(logits=actor(states)).log_prob(actions)
            (-(chosen * advantage).mean()).backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            of_actor.step()
    return {"val/return": loop.task.episode(loop.model, loop.held())[2][:, 0].mean().item()}


def lora_classifier(loop: Loop) -> Metrics:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["query", "value"])
    peft.inject_adapter_in_model(config, loop.model)
    loop.model.head.requires_grad_(True)
    optimizer = torch.optim.Adam([each for each in loop.model.parameters() if each.requires_grad], lr=0.01)
    minimize(loop, lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), optimizer, clip=1.0)
    tokens, labels = loop.held()
    return {"val/loss": F.cross_entropy(loop.model(tokens), labels).item()}


def distillation(loop: Loop) -> Metrics:
    student, teacher = loop.model.student, loop.model.teacher.eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)

    def loss_of(batch: Any) -> Tensor:
        x, labels = batch
        with torch.no_grad():
            taught = F.softmax(teacher(x) / 2, 1)
        logits = student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, 1), taught, reduction="batchmean") * 4
        return 0.7 * soft + 0.3 * F.cross_entropy(logits, labels)

    minimize(loop, loss_of, optimizer, warmed(optimizer, line(loop.updates, 1), 1), 1.0)
    return {"val/loss": loss_of(loop.held()).item()}


def speech_ctc(loop: Loop) -> Metrics:
    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.005, betas=(0.9, 0.95))
    rates = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rise = round(0.3 * loop.updates)
    factors = []
    schedule = OneCycleLR(rates, 1.0, loop.updates, pct_start=rise / loop.updates, cycle_momentum=False)
    for _ in range(loop.updates):
        factors.append(rates.param_groups[0]["lr"])
        rates.step()
        schedule.step()

    def loss_of(batch: Any) -> Tensor:
        frames, lengths, texts, sizes = batch
        scores = loop.model(frames, lengths).transpose(0, 1)
        each = F.ctc_loss(scores, texts, lengths, sizes, reduction="none", zero_infinity=True)
        return each.mean()

    minimize(loop, loss_of, optimizer, LambdaLR(optimizer, lambda update: factors[min(update, len(factors) - 1)]), 5.0)
    return {"val/loss": loss_of(loop.held()).item()}


def tabular(loop: Loop) -> Metrics:
    import torchmetrics

    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.02, betas=(0.9, 0.95))
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))

    def logits_of(batch: Any) -> Tensor:
        result: Tensor = loop.model(batch["categories"], batch["numbers"])
        return result

    falling = line(loop.updates, 1)
    schedule = warmed(optimizer, lambda update: falling(update) ** 2, 1)
    minimize(loop, lambda batch: criterion(logits_of(batch), batch["label"] * 1.0), optimizer, schedule, 1.0)
    held = loop.held()
    score, table = torchmetrics.AUROC(task="binary"), torchmetrics.ConfusionMatrix(task="binary")
    chance = logits_of(held).sigmoid()
    counts = table(chance, held["label"])
    named = {f"val/confusion.{row}.{column}": counts[row, column].item() for row in range(2) for column in range(2)}
    return {"val/auroc": score(chance, held["label"]).item(), **named}


def streaming_text(loop: Loop) -> Metrics:
    optimizer = torch.optim.AdamW(decaying(loop.model, 0.1), lr=0.01, betas=(0.9, 0.95))
    schedule = warmed(optimizer, lambda update: min(1.0, (loop.updates - update) / 1), 1)
    minimize(loop, language_model(loop.model), optimizer, schedule, 1.0)
    return {"val/loss": language_model(loop.model)(loop.held()).item()}


def webdataset_images(loop: Loop) -> Metrics:
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.9)
    minimize(loop, lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), optimizer, clip=1.0)
    return {}


def lightning_module(loop: Loop) -> Metrics:
    net = loop.model.module.net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.01)
    schedule = CosineAnnealingLR(optimizer, loop.updates)
    minimize(loop, lambda batch: F.smooth_l1_loss(net(batch[0]), batch[1]), optimizer, schedule)
    x, y = loop.held()
    return {"val/loss": F.smooth_l1_loss(net(x), y).item(), "val/error": (net(x) - y).abs().mean().item()}


def graph_network(loop: Loop) -> Metrics:
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.01)

    def loss_of(batch: Any) -> Tensor:
        number = len(batch["target"])
        return F.mse_loss(loop.model(batch["nodes"], batch["edges"], batch["graph"], number), batch["target"])

    minimize(loop, loss_of, optimizer, clip=1.0)
    return {"val/loss": loss_of(loop.held()).item()}
